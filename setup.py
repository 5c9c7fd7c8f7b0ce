"""Packaging of the verl_mg library."""

from setuptools import find_packages, setup

setup(
    name="verl-mg",
    version="0.1.0",
    description="Reinforcement learning of large language models as one SPMD program over Megatron.",
    python_requires=">=3.11",
    packages=find_packages(include=["verl_mg", "verl_mg.*"]),
    package_data={"verl_mg.view": ["page/*"]},
    install_requires=[
        "torch>=2.11",
        "megatron-core>=0.16.1,<0.17",
        "transformers>=5.17,<6",
        "safetensors>=0.5",
        "numpy",
        "einops",
        "httpx>=0.27",
        "tenacity>=9",
        "psutil",
        "pydantic>=2.10",
        "PyYAML>=6",
        "rich>=13",
        "Jinja2>=3.1",
        "math-verify>=0.8",
        "pyarrow>=18",
        "tensorboard>=2.18",
        "matplotlib>=3.9",
    ],
    extras_require={
        "sglang": ["sglang==0.5.23"],
        "gpu": ["transformer-engine[pytorch]>=2.8"],
        "mpi": ["mpi4py>=4"],
        "trackers": ["wandb>=0.19", "mlflow-skinny>=3.7", "swanlab>=0.9"],
        "test": ["pytest>=8", "pytest-timeout", "pytest-xdist>=3.6", "hypothesis>=6", "ruff", "mypy"],
    },
    entry_points={"console_scripts": ["verl-mg = verl_mg.cli:main"]},
)
