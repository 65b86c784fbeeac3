"""Where the advice comes from; a line each, for people to look up."""

from __future__ import annotations

NCCL_ENVIRONMENT = "NCCL user guide, Environment Variables"
NCCL_GPU_TROUBLES = "NCCL user guide, Troubleshooting, GPU Direct and PCI ACS"
UCX_CONFIGURATION = "UCX, ib_iface.c and FAQ (ucx_info -c -f)"
TORCH_DISTRIBUTED = "PyTorch, torch.distributed, Choosing the network interface"
NVIDIA_ROCE = "NVIDIA MLNX_OFED documentation, Quality of Service and RoCE"
DCQCN = "Zhu et al., Congestion Control for Large-Scale RDMA Deployments, SIGCOMM 2015"
ROCE_AT_SCALE = "Guo et al., RDMA over Commodity Ethernet at Scale, SIGCOMM 2016"
INFINIBAND_SPECIFICATION = "InfiniBand Architecture Specification, Annex A17 (RoCEv2)"
KERNEL_BONDING = "Linux kernel documentation, networking/bonding"
KERNEL_SYSCTL = "Linux kernel documentation, networking/ip-sysctl"
KERNEL_PCI_SYSFS = "Linux kernel documentation, ABI/testing/sysfs-bus-pci"
ESNET_TUNING = "ESnet fasterdata, Host Tuning"
BBR = "Cardwell et al., BBR: Congestion-Based Congestion Control, ACM Queue 2016"
RED_HAT_RDMA = "Red Hat, Configuring InfiniBand and RDMA networks, pinned memory"
