# The image that islands and serving run: `docker build -t ddm-ray .`
FROM python:3.11-slim
# Triton builds a launcher for each kernel, and torch.compile its code for a CPU: `compile` needs a compiler.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home ddm
WORKDIR /home/ddm/ddm-ray
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY ddm_ray ddm_ray
RUN pip install --no-cache-dir --constraint constraints.txt '.[all]'
COPY jobs jobs
COPY serving serving
COPY cluster_configs cluster_configs
RUN chown ddm .
USER ddm
ENV RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1
CMD ["ddm", "--help"]
