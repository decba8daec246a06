//! All events that the VMM can report.

use std::collections::BTreeMap;

use super::limiter::Source;

/// Maximum length of a text in an event, in characters.
const MAX_TEXT: usize = 500;

/// Source and name of [`Event::PoolUsage`].
const POOL_USAGE: (&str, &str) = ("foreshore", "pool-usage");

/// Source and name of [`Event::PoolFull`].
const POOL_FULL: (&str, &str) = ("foreshore", "pool-full");

/// Event that a device defines in its own module.
#[derive(Debug, PartialEq, Eq)]
pub struct DeviceEvent {
    pub source: &'static str,
    pub name: &'static str,
    /// Names of the properties.
    pub properties: &'static [&'static str],
}

/// Events. Names and properties are those of Cloud Hypervisor, unless the source is `foreshore`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// The VMM has read its command line.
    VmmStarting,
    /// The VMM is about to exit. This is always the last event.
    VmmShutdown,
    /// The VM is being built.
    VmBooting,
    /// The machine for a boot or reboot could not be built.
    BootFailed {
        reason: &'a str,
    },
    /// The vCPUs have started. Other events report the state of the guest.
    VmBooted,
    /// A pause has begun.
    VmPausing,
    /// vCPUs and devices have stopped.
    VmPaused,
    /// A resume has begun.
    VmResuming,
    VmResumed,
    /// The VM has ended. Its configuration is kept.
    VmShutdown,
    /// The VM is about to be rebuilt.
    VmRebooting,
    VmRebooted,
    /// The configuration was deleted.
    VmDeleted,
    /// A resize has passed its checks.
    VmResizing,
    /// The guest was notified of the resize.
    VmResized,
    /// The guest's driver has activated a virtio device.
    DeviceActivated {
        id: &'a str,
    },
    /// The guest's driver has reset a virtio device.
    DeviceReset {
        id: &'a str,
    },
    /// The guest has not pinged its watchdog in time, so the VMM restarts it.
    WatchdogExpired,
    /// Event that a device defines in its own module, with the values of the properties.
    OfDevice {
        event: &'a DeviceEvent,
        values: &'a [&'a str],
    },
    /// The guest restarts too often, so its next start is delayed.
    RestartDelayed {
        delay_ms: u64,
    },
    /// The guest has overwritten the BTT of a volume. The volume is therefore presented as a
    /// read-only disk.
    VolumeReplaced {
        /// Path of the pool.
        pool: &'a str,
        /// Name of the volume.
        volume: &'a str,
    },
    /// The BTT of a volume is damaged. The volume is therefore presented as a read-only disk.
    VolumeDamaged {
        /// Path of the pool.
        pool: &'a str,
        /// Name of the volume.
        volume: &'a str,
        /// Damaged arena, and the kind of the damage.
        reason: &'a str,
    },
    /// Volumes use a large part of a pool.
    PoolUsage {
        /// Path of the pool.
        pool: &'a str,
        /// Highest threshold that the used part has reached, in percent.
        threshold_percent: u8,
        /// Seconds until the pool is full at the present growth. `None` if it does not grow.
        time_to_full_s: Option<u64>,
    },
    /// A write found no space in a pool.
    PoolFull {
        /// Path of the pool.
        pool: &'a str,
        /// Volume of the write.
        volume: &'a str,
        /// `pause` or `error`.
        on_full: &'a str,
    },
    /// A device was added to the running guest.
    DeviceAdded {
        id: &'a str,
        /// Address on the PCI bus.
        bdf: &'a str,
    },
    /// The guest has ejected a device, and the device's files are closed.
    DeviceRemoved {
        id: &'a str,
        bdf: &'a str,
    },
    /// The guest has reached the requested number of vCPUs.
    VcpusResized {
        vcpus: u8,
    },
    /// The VMM has paused the VM because of a failure that cannot be reported to the guest.
    Failed {
        reason: &'a str,
    },
    /// A zone has reached the requested size.
    MemoryReached {
        zone: &'a str,
        /// Plugged size.
        plugged_bytes: u64,
    },
    /// The host cannot provide the requested size of a zone.
    MemoryRefused {
        zone: &'a str,
        reason: &'a str,
        /// Size that is currently requested.
        requested_bytes: u64,
    },
    /// The virtio-mem device of a zone has refused the guest's driver.
    MemoryDriverUnsupported {
        /// Id of the zone.
        zone: &'a str,
        /// Feature that the driver lacks.
        reason: &'a str,
    },
}

impl Event<'_> {
    pub fn name(&self) -> (&'static str, &'static str) {
        match self {
            Self::VmmStarting => ("vmm", "starting"),
            Self::VmmShutdown => ("vmm", "shutdown"),
            Self::VmBooting => ("vm", "booting"),
            Self::BootFailed { .. } => ("foreshore", "boot-failed"),
            Self::VmBooted => ("vm", "booted"),
            Self::VmPausing => ("vm", "pausing"),
            Self::VmPaused => ("vm", "paused"),
            Self::VmResuming => ("vm", "resuming"),
            Self::VmResumed => ("vm", "resumed"),
            Self::VmShutdown => ("vm", "shutdown"),
            Self::VmRebooting => ("vm", "rebooting"),
            Self::VmRebooted => ("vm", "rebooted"),
            Self::VmDeleted => ("vm", "deleted"),
            Self::VmResizing => ("vm", "resizing"),
            Self::VmResized => ("vm", "resized"),
            Self::DeviceActivated { .. } => ("virtio-device", "activated"),
            Self::DeviceReset { .. } => ("virtio-device", "reset"),
            Self::WatchdogExpired => ("foreshore", "watchdog-expired"),
            Self::OfDevice { event, .. } => (event.source, event.name),
            Self::RestartDelayed { .. } => ("foreshore", "restart-delayed"),
            Self::VolumeReplaced { .. } => ("foreshore", "volume-replaced"),
            Self::VolumeDamaged { .. } => ("foreshore", "volume-damaged"),
            Self::PoolUsage { .. } => POOL_USAGE,
            Self::PoolFull { .. } => POOL_FULL,
            Self::DeviceAdded { .. } => ("foreshore", "device-added"),
            Self::DeviceRemoved { .. } => ("vm", "device-removed"),
            Self::VcpusResized { .. } => ("foreshore", "vcpus-resized"),
            Self::Failed { .. } => ("foreshore", "failed"),
            Self::MemoryReached { .. } => ("foreshore", "memory-reached"),
            Self::MemoryRefused { .. } => ("foreshore", "memory-refused"),
            Self::MemoryDriverUnsupported { .. } => ("foreshore", "memory-driver-unsupported"),
        }
    }

    /// Source whose rate limit applies if the guest can repeat the event.
    pub(super) fn concerns(&self) -> Source {
        match self {
            Self::DeviceActivated { id } | Self::DeviceReset { id } => {
                Source::Device((*id).to_owned())
            }
            Self::MemoryReached { zone, .. }
            | Self::MemoryRefused { zone, .. }
            | Self::MemoryDriverUnsupported { zone, .. } => Source::Zone((*zone).to_owned()),
            Self::OfDevice { event, .. } => Source::Kind(event.source, event.name),
            Self::PoolUsage { .. } => Source::Kind(POOL_USAGE.0, POOL_USAGE.1),
            Self::PoolFull { .. } => Source::Kind(POOL_FULL.0, POOL_FULL.1),
            _ => Source::Vm,
        }
    }

    pub(super) fn properties(&self) -> Option<BTreeMap<&'static str, String>> {
        let properties = match self {
            Self::DeviceActivated { id } | Self::DeviceReset { id } => {
                vec![("id", without_braces(id))]
            }
            Self::DeviceAdded { id, bdf } | Self::DeviceRemoved { id, bdf } => {
                vec![("id", without_braces(id)), ("bdf", without_braces(bdf))]
            }
            Self::OfDevice { event, values } => {
                let (names, given) = (event.properties.len(), values.len());
                assert_eq!(names, given, "values of the event {}", event.name);
                let values = values.iter().map(|value| without_braces(value));
                event.properties.iter().copied().zip(values).collect()
            }
            Self::RestartDelayed { delay_ms } => vec![("delay_ms", delay_ms.to_string())],
            Self::VolumeReplaced { pool, volume } => {
                vec![("pool", without_braces(pool)), ("volume", without_braces(volume))]
            }
            Self::VolumeDamaged { pool, volume, reason } => vec![
                ("pool", without_braces(pool)),
                ("volume", without_braces(volume)),
                ("reason", without_braces(reason)),
            ],
            Self::PoolUsage { pool, threshold_percent, time_to_full_s } => {
                let time = time_to_full_s.map(|time| ("time_to_full_s", time.to_string()));
                let mut properties = vec![
                    ("pool", without_braces(pool)),
                    ("threshold_percent", threshold_percent.to_string()),
                ];
                properties.extend(time);
                properties
            }
            Self::PoolFull { pool, volume, on_full } => vec![
                ("pool", without_braces(pool)),
                ("volume", without_braces(volume)),
                ("on_full", without_braces(on_full)),
            ],
            Self::VcpusResized { vcpus } => vec![("vcpus", vcpus.to_string())],
            Self::Failed { reason } | Self::BootFailed { reason } => {
                vec![("reason", without_braces(reason))]
            }
            Self::MemoryReached { zone, plugged_bytes } => {
                vec![("zone", without_braces(zone)), ("plugged_bytes", plugged_bytes.to_string())]
            }
            Self::MemoryRefused { zone, reason, requested_bytes } => vec![
                ("zone", without_braces(zone)),
                ("reason", without_braces(reason)),
                ("requested_bytes", requested_bytes.to_string()),
            ],
            Self::MemoryDriverUnsupported { zone, reason } => {
                vec![("zone", without_braces(zone)), ("reason", without_braces(reason))]
            }
            _ => return None,
        };
        Some(properties.into_iter().collect())
    }
}

/// Replaces braces in a text, because libvirt counts all braces to find the end of an event, even
/// those in texts. Truncates long texts, so that an event fits into one write to a FIFO.
fn without_braces(text: &str) -> String {
    text.chars().take(MAX_TEXT).collect::<String>().replace('{', "(").replace('}', ")")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_names_of_two_sources_have_a_limit_each() {
        let of = |source| DeviceEvent { source, name: "panic", properties: &[] };
        let concerns =
            |event: DeviceEvent| Event::OfDevice { event: &event, values: &[] }.concerns();
        assert_eq!(concerns(of("one")), concerns(of("one")));
        assert_ne!(concerns(of("one")), concerns(of("other")));
    }

    #[test]
    #[should_panic(expected = "values of the event panic")]
    fn device_event_without_a_value_for_each_name_is_refused() {
        let event = DeviceEvent { source: "one", name: "panic", properties: &["first", "last"] };
        Event::OfDevice { event: &event, values: &["only"] }.properties();
    }

    #[test]
    fn no_property_has_a_brace() {
        let failed = Event::Failed { reason: "flush of {a} failed}" };
        assert_eq!(failed.properties().unwrap()["reason"], "flush of (a) failed)");
        assert_eq!(Event::VmBooted.properties(), None);
    }
}
