# mtrain on a host with NVIDIA GPUs (driver 580 or later, NVIDIA Container Toolkit).
#
#   docker build -t mtrain --build-arg USER_ID="$(id -u)" .
#   docker run --rm -it --gpus all --ipc=host -v "$PWD:/work" mtrain
#   docker run --rm -it --gpus all --ipc=host -v "$PWD:/work" mtrain \
#       mtrain train model=qwen3b seq=128k
#   docker run --rm -it --gpus all --ipc=host -w /opt/mtrain mtrain python -m pytest
#
# --ipc=host: NCCL and the data workers share memory between processes. Runs are written to the
# mounted folder by the user USER_ID. On several nodes, the network cards need three more options:
#
#   --network=host --device=/dev/infiniband --ulimit memlock=-1

# devel, not runtime: Triton and NVRTC compile kernels on first use, with the CUDA headers and a C
# compiler.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# The last line has the user-space drivers of InfiniBand and RoCE cards, which NCCL loads.
# Versions are those of the pinned Ubuntu release.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        python3 python3-dev python3-venv build-essential \
        libibverbs1 librdmacm1 ibverbs-providers \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1

# Install the largest package first, so that a change in mtrain's source does not install it again.
RUN pip install --no-cache-dir "torch>=2.11,<2.15"

WORKDIR /opt/mtrain
COPY pyproject.toml hatch_build.py mkdocs.yml README.md CONTRIBUTING.md CHANGELOG.md LICENSE ./
COPY CITATION.cff SECURITY.md ./
COPY conf conf
COPY kernels kernels
COPY profiles profiles
COPY mtrain_cli mtrain_cli
COPY mtrain_extras mtrain_extras
COPY docs docs
COPY examples examples
COPY tests tests
RUN pip install --no-cache-dir -e '.[cuda,hopper,hf,eval,data,tensorboard,test]'

# Ubuntu's image has a user of its own, often with the same number.
ARG USER_ID=1000
RUN (userdel --remove ubuntu || true) \
    && useradd --create-home --no-log-init --uid "$USER_ID" mtrain \
    && install -d -o mtrain /work
USER mtrain
WORKDIR /work

CMD ["mtrain", "train"]
