//! Flags of Cloud Hypervisor that foreshore does not have, so that each is refused with a reason rather than as
//! a typing error.

/// Flag and reason.
const FLAGS: &[(&str, &str)] = &[
    ("--debug-console", "use --serial or --console"),
    ("--device", "there is no device passthrough"),
    ("--event-monitor", "events are not implemented; see --log-file and --metrics"),
    ("--firmware", "guests are booted by --kernel"),
    ("--fs", "virtio-fs is not implemented"),
    ("--gdb", "there is no debug stub"),
    ("--generic-vhost-user", "vhost-user is not implemented"),
    ("--host-data", "confidential guests are not supported"),
    ("--igvm", "confidential guests are not supported"),
    ("--landlock", "it is not implemented"),
    ("--landlock-rules", "it is not implemented"),
    ("--net", "virtio-net is not implemented; see --vsock"),
    ("--pci-segment", "there is one PCI segment"),
    ("--platform", "it is not implemented"),
    ("--pvpanic", "it is not implemented"),
    ("--rate-limit-group", "there is nothing to limit yet"),
    ("--restore", "snapshots are not implemented"),
    ("--tpm", "it is not implemented"),
    ("--user-device", "there is no device passthrough"),
    ("--vdpa", "it is not implemented"),
    ("--watchdog", "it is not implemented"),
];

/// Why `flag` is refused, if it is one of Cloud Hypervisor's.
pub(super) fn reason(flag: &str) -> Option<&'static str> {
    FLAGS.iter().find(|(name, _)| *name == flag).map(|(_, reason)| *reason)
}
