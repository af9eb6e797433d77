"""The exactness study: cost and benefit of bit-identical training."""
