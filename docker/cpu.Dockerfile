# docker build -f docker/cpu.Dockerfile -t fastfold:cpu .
# docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/data" fastfold:cpu infer protein.fasta --out results
# By its digest in 'make images'.
ARG BASE=python:3.12-slim
FROM ${BASE}

# The wheels of PyTorch without CUDA, which are a tenth of the size; docs/install.md says where they are.
ARG TORCH_INDEX
WORKDIR /src
COPY pyproject.toml constraints.txt LICENSE NOTICE ./
COPY docs/package_index.md docs/
COPY fastfold fastfold
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$(sed -n 's/^torch==//p' constraints.txt)" \
    && pip install --no-cache-dir --constraint constraints.txt . \
    && fastfold verify --device cpu

# Another user of the host (--user) has no folder of its own here, and needs a place for caches.
RUN useradd --create-home --uid 1000 fastfold && chmod 1777 /home/fastfold
ENV HOME=/home/fastfold
WORKDIR /data
USER fastfold
ENTRYPOINT ["fastfold"]
