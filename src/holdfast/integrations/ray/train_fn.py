"""What a worker runs for a trainer that was given a function: ``python -m holdfast.integrations.ray.train_fn``."""

from holdfast.integrations.ray.function import call_kept

if __name__ == "__main__":
    call_kept()
