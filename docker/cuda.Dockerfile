# docker build -f docker/cuda.Dockerfile -t fastfold:cuda .
# docker run --rm --user "$(id -u):$(id -g)" --gpus all -v "$PWD:/data" fastfold:cuda infer protein.fasta --out results
# The wheel of PyTorch brings CUDA: the host needs NVIDIA's driver and container toolkit alone.
# By its digest in 'make images'.
ARG BASE=python:3.12-slim
FROM ${BASE}

# Triton compiles the starter of its kernels with a C compiler.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY pyproject.toml constraints.txt LICENSE NOTICE ./
COPY docs/package_index.md docs/
COPY fastfold fastfold
RUN pip install --no-cache-dir --constraint constraints.txt ".[cuda13]" \
    && fastfold verify --device cpu

ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Another user of the host (--user) has no folder of its own here, and needs a place for caches.
RUN useradd --create-home --uid 1000 fastfold && chmod 1777 /home/fastfold
ENV HOME=/home/fastfold
WORKDIR /data
USER fastfold
ENTRYPOINT ["fastfold"]
