"""Which parallelism loses what, and what each way of recovering costs (Amatya 2017)."""
