"""Doing it: the session that a script talks to, and what it is made of.

``session`` is what a script talks to and ``step`` what its loop gets; ``run`` carries out the orders of
:mod:`holdfast.recovery`. ``batches`` says which samples belong to which slice, ``place`` how far the plan is used up,
``ledger`` what of it is in the weights. ``replica`` holds the model, ``gradients`` the layout of what is summed.
``beginning`` saves the state and brings everybody to the same one; ``log`` writes down what happens.
"""
