"""Holdfast inside other training frameworks; each module needs its framework, so this package imports none of them."""
