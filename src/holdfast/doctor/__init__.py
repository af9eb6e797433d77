"""Finding out on this machine what breaks bits: of the usual layers, of a script's own model, and of the machine itself.

``target.py`` is something that computes, ``checks.py`` looks whether it always computes the same bits, ``layers.py`` has layers that
most models are made of, ``script.py`` takes those of a script's model, ``machine.py`` tells what there is, ``report.py`` says what was
found and what to do. Scripts are run in processes of their own: ``subprocesses.py`` starts them, ``__main__.py`` is one.
"""
