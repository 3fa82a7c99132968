# Two targets: `cpu` and `gpu`. Both run as a user without rights and hold no model; the model lies in a volume.
#   docker build --target cpu -t pointsman:cpu .

FROM python:3.11-slim-bookworm AS build-cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY workers workers
COPY pipeline pipeline
COPY tiering tiering
# Name an index with PyTorch's CPU builds here: the default build brings gigabytes of CUDA.
ARG PIP_ARGS=""
RUN /opt/venv/bin/pip install ${PIP_ARGS} .

FROM nvidia/cuda:12.8.1-devel-ubuntu24.04 AS build-gpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv python3-dev g++ ninja-build \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY workers workers
COPY pipeline pipeline
COPY tiering tiering
# flash-attn is compiled against the installed PyTorch, so that comes first, and it sees it.
RUN /opt/venv/bin/pip install . setuptools wheel packaging psutil
RUN MAX_JOBS=4 /opt/venv/bin/pip install --no-build-isolation ".[gpu]"

FROM python:3.11-slim-bookworm AS cpu
# The native operators are built on the machine that runs them, for its processor, at the first start.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build-cpu /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=passive
# Named volumes take over the owner of the folder that they first cover.
RUN useradd --uid 10001 --create-home pointsman \
 && install -d -o pointsman -g pointsman /run/pointsman /models /data
USER pointsman
WORKDIR /home/pointsman
ENTRYPOINT ["pointsman"]
CMD ["--help"]

FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04 AS gpu
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build-gpu /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=passive
RUN useradd --uid 10001 --create-home pointsman \
 && install -d -o pointsman -g pointsman /run/pointsman /models /data
USER pointsman
WORKDIR /home/pointsman
ENTRYPOINT ["pointsman"]
CMD ["--help"]
