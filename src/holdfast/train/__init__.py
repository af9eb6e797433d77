"""Doing it: the session that a script talks to, and what it is made of.

``session`` carries out the orders of :mod:`holdfast.recovery`; ``batches`` says which samples belong to which slice;
``step`` is what the script's loop gets; ``gradients`` lays out what is summed; ``state`` hashes, copies and saves.
"""
