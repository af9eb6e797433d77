"""A second simulator, written for reading: one history, event by event, asking the protocol at every recovery. Tests hold the shipped one to it."""
