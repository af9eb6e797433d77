"""The campaign: random plans in which the operating system attacks a job from outside, and what is wrong with its end.

Run by ``make chaos``; see ``__main__.py``. ``tests/support/soak.py`` draws faults that the job injects into itself.
"""
