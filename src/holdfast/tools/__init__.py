"""Tools beside training, which the core does not need: the doctor; checkpoints and files of other programs; certificates and replay; debugging."""
