"""The API of a training script: the session, its steps, and the models that it accepts."""
