"""Find silent corruption, and say whose it is: fingerprints of replicas, values far out of range, histories that do not reproduce.

Nothing here decides or sends anything: :mod:`holdfast.integrity.sdc_guard` brings what is found into the closing sum, and carries
out the policy. docs/how-to/guard-against-corruption.md says what is found, and what is not.
"""
