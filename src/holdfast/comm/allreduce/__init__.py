"""The all-reduce whose order belongs to the job, and the paths that its bytes take."""
