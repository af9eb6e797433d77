"""Helpers to test your own components: ``contract`` has the checks that every communicator must pass."""
