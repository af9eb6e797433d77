"""What a training script uses: the session, its steps, and the models that it takes."""
