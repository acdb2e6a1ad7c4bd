# The edge agent. From the root of a checkout:
#   docker build -f deploy/containers/edge.Dockerfile -t registry.example/overspill-edge:0.1.0 .
# With CUDA: --build-arg EXTRA=edge-gpu, and BASE an image that has NVIDIA's runtime libraries and Python 3.10 or newer. A Jetson
# takes NVIDIA's L4T image of its JetPack as BASE, and the wheel index that NVIDIA names for it in PIP_ARGS.
# Its router is compiled (docs/install.md) with --build-arg COMPILE=1, where BASE has gcc and Python's headers or Debian's packages.
ARG BASE=python:3.11-slim
FROM ${BASE} AS build
ARG PIP_ARGS=""
ARG EXTRA=edge
ARG COMPILE=0
RUN if [ "${COMPILE}" != 0 ]; then apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev; fi
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE overspill.py ./
COPY router router
COPY models models
COPY hardware_profiles hardware_profiles
COPY edge_agent edge_agent
COPY cloud_tier cloud_tier
RUN python3 -m venv --system-site-packages /opt/overspill \
 && OVERSPILL_COMPILE=${COMPILE} /opt/overspill/bin/pip install --no-cache-dir ${PIP_ARGS} ".[${EXTRA}]"

FROM ${BASE}
COPY --from=build /opt/overspill /opt/overspill
RUN useradd --system --uid 10001 --user-group --home-dir /tmp --shell /usr/sbin/nologin overspill
ENV PATH=/opt/overspill/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OVERSPILL_MODELS=/models
USER 10001:10001
EXPOSE 8600
STOPSIGNAL SIGTERM
ENTRYPOINT ["overspill"]
CMD ["edge", "run", "--config", "/etc/overspill/edge.toml"]
