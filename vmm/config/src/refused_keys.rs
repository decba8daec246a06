//! Keys that several flags refuse for the same reason.

use crate::{OFF, Refused};

/// Keys of devices on the PCI bus.
pub const PCI: &[Refused] = &[
    Refused { key: "iommu", neutral: OFF, why: "there is no virtual IOMMU" },
    Refused { key: "pci_segment", neutral: &["0"], why: "there is one PCI segment" },
];

/// Keys of devices whose PCI slot cannot be chosen.
pub const SLOT: &[Refused] =
    &[Refused { key: "pci_device_id", neutral: &[], why: "slots are given out in turn" }];

pub const NO_VHOST_USER: &str = "vhost-user is not implemented";

/// Keys of devices that another process could serve.
pub const VHOST_USER: &[Refused] = &[
    Refused { key: "vhost_user", neutral: OFF, why: NO_VHOST_USER },
    Refused { key: "socket", neutral: &[], why: NO_VHOST_USER },
    Refused { key: "vhost_socket", neutral: &[], why: NO_VHOST_USER },
];

const NO_RATE_LIMITS: &str = "there are no rate limits: io.max of the VMM's cgroup limits disks, and tc on the tap limits networks";

/// Keys of devices with rate limits in Cloud Hypervisor.
pub const RATE_LIMITS: &[Refused] = &[
    Refused { key: "rate_limit_group", neutral: &[], why: NO_RATE_LIMITS },
    Refused { key: "rate_limiter_config", neutral: &[], why: NO_RATE_LIMITS },
    Refused { key: "bw_size", neutral: &["0"], why: NO_RATE_LIMITS },
    Refused { key: "bw_one_time_burst", neutral: &["0"], why: NO_RATE_LIMITS },
    Refused { key: "bw_refill_time", neutral: &["0"], why: NO_RATE_LIMITS },
    Refused { key: "ops_size", neutral: &["0"], why: NO_RATE_LIMITS },
    Refused { key: "ops_one_time_burst", neutral: &["0"], why: NO_RATE_LIMITS },
    Refused { key: "ops_refill_time", neutral: &["0"], why: NO_RATE_LIMITS },
];
