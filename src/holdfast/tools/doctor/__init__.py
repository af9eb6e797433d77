"""Checks on this machine what changes bits: in common layers, in a script's own model, and in the machine itself.

``target.py`` defines what is computed, ``checks.py`` compares its bits under different conditions, ``layers.py`` has
common layers, ``script.py`` takes those of a script's model, ``machine.py`` describes the machine, ``report.py`` prints
findings and advice. Scripts run in separate processes, which ``subprocesses.py`` starts and ``__main__.py`` runs.
"""
