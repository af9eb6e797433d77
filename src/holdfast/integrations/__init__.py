"""Holdfast inside the training loops of other frameworks; import the module of the framework."""
