//! Keys that several flags refuse for the same reason.

use crate::{OFF, Refused};

/// Refused keys of devices on the PCI bus.
pub const PCI: &[Refused] = &[
    Refused { key: "iommu", neutral: OFF, why: "a virtual IOMMU is not implemented" },
    Refused { key: "pci_segment", neutral: &["0"], why: "the VM has one PCI segment" },
];

/// Refused keys of devices whose PCI slot cannot be chosen.
pub const SLOT: &[Refused] =
    &[Refused { key: "pci_device_id", neutral: &[], why: "slots are assigned in order" }];

pub const NO_VHOST_USER: &str = "vhost-user is not implemented";

/// Refused keys that would let another process serve the device.
pub const VHOST_USER: &[Refused] = &[
    Refused { key: "vhost_user", neutral: OFF, why: NO_VHOST_USER },
    Refused { key: "socket", neutral: &[], why: NO_VHOST_USER },
    Refused { key: "vhost_socket", neutral: &[], why: NO_VHOST_USER },
];

const NO_RATE_LIMITS: &str = "rate limits are not implemented; limit disks with io.max of the VMM's cgroup, and networks with tc on the tap";

/// Refused keys of devices that have rate limits in Cloud Hypervisor.
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
