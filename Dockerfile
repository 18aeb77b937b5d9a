# mtrain on a host with NVIDIA GPUs (driver 580 or later, NVIDIA Container Toolkit).
#
#   docker build -t mtrain .
#   docker run --rm -it --gpus all --ipc=host -v "$PWD/runs:/opt/mtrain/runs" mtrain
#   docker run --rm -it --gpus all --ipc=host -v "$PWD/runs:/opt/mtrain/runs" mtrain \
#       mtrain train model=qwen3b seq=128k
#   docker run --rm -it --gpus all --ipc=host mtrain python -m pytest
#
# --ipc=host: NCCL and the data workers share memory between processes.

# devel, not runtime: Triton and NVRTC compile kernels on first use, with the CUDA headers and a C
# compiler.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        python3 python3-dev python3-venv build-essential \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1

# Install the largest package first, so that a change in mtrain's source does not install it again.
RUN pip install --no-cache-dir "torch>=2.11,<2.14"

WORKDIR /opt/mtrain
COPY pyproject.toml hatch_build.py mkdocs.yml README.md CONTRIBUTING.md CHANGELOG.md LICENSE ./
COPY conf conf
COPY kernels kernels
COPY profiles profiles
COPY mtrain_cli mtrain_cli
COPY mtrain_studies mtrain_studies
COPY docs docs
COPY examples examples
COPY tests tests
RUN pip install --no-cache-dir -e '.[cuda,hopper,data,test]'

CMD ["mtrain", "train"]
