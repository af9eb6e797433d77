"""The job trained by the benchmarks: the digits CNN, 72 steps of 128 samples."""

from holdfast_lab.workloads.train import main

main(["--dataset", "digits", "--model", "cnn", "--optimizer", "sgd", "--epochs", "6"])
