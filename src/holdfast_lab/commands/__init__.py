"""The commands of the laboratory, registered with the command line through entry points."""
