"""The commands of the laboratory, found by the command line through entry points."""
