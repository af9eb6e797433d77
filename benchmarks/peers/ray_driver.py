"""Trains the digits CNN with Ray Train: the worker of torchrun, restarted by Ray.

python ray_driver.py WORKERS FOLDER
"""

import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train() -> None:
    """Be one worker. Ray has connected the process group."""
    import ray.train
    import torch
    import torchrun_worker
    from digits_task import Death, Diary

    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    diary = Diary(rank)
    diary.note("start", began_s=torchrun_worker.STARTED_S)
    try:
        torchrun_worker.train(rank, diary, Death(rank, diary))
    except RuntimeError as error:  # raised by DDP when a peer has failed
        diary.note("error", message=str(error)[:200])
        raise


def main() -> None:
    """Start a cluster of this node, and train until this process is ended."""
    workers, folder = int(sys.argv[1]), sys.argv[2]
    ray.init(num_cpus=2 * workers, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    TorchTrainer(
        train,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=False),
        run_config=RunConfig(storage_path=f"{folder}-results", failure_config=FailureConfig(max_failures=-1)),
    ).fit()


if __name__ == "__main__":
    main()
