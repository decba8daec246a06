//! Test that compares all events with their documentation.

use super::event::{DeviceEvent, Event};

const DOCUMENT: &str = include_str!("../../../../docs/reference/events.md");

/// An example of each event.
const ALL: [Event<'_>; 30] = [
    Event::VmmStarting,
    Event::VmmShutdown,
    Event::VmBooting,
    Event::BootFailed { reason: "r" },
    Event::VmBooted,
    Event::VmPausing,
    Event::VmPaused,
    Event::VmResuming,
    Event::VmResumed,
    Event::VmShutdown,
    Event::VmRebooting,
    Event::VmRebooted,
    Event::VmDeleted,
    Event::VmResizing,
    Event::VmResized,
    Event::DeviceActivated { id: "i" },
    Event::DeviceReset { id: "i" },
    Event::WatchdogExpired,
    Event::RestartDelayed { delay_ms: 1000 },
    Event::VolumeReplaced { pool: "p", volume: "v" },
    Event::VolumeDamaged { pool: "p", volume: "v", reason: "r" },
    Event::PoolUsage { pool: "p", threshold_percent: 80, time_to_full_s: Some(1) },
    Event::PoolFull { pool: "p", volume: "v", on_full: "pause" },
    Event::DeviceAdded { id: "i", bdf: "b" },
    Event::DeviceRemoved { id: "i", bdf: "b" },
    Event::VcpusResized { vcpus: 4 },
    Event::Failed { reason: "r" },
    Event::MemoryReached { zone: "z", plugged_bytes: 1 },
    Event::MemoryRefused { zone: "z", reason: "r", requested_bytes: 1 },
    Event::MemoryDriverUnsupported { zone: "z", reason: "r" },
];

/// Checks that docs/reference/events.md lists exactly the existing events with their properties,
/// including events of devices.
pub fn check_document<'a>(of_devices: impl Iterator<Item = &'a DeviceEvent>) {
    let names = |cell: &str| -> Vec<String> {
        cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    };
    let mut documented = Vec::new();
    for row in DOCUMENT.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let (source, mut properties) = (names(cells[1]).remove(0), names(cells[3]));
        properties.sort();
        documented.extend(
            names(cells[2]).into_iter().map(|name| (source.clone(), name, properties.clone())),
        );
    }
    let mut emitted: Vec<_> = ALL
        .iter()
        .map(|event| {
            let (source, name) = event.name();
            let properties =
                event.properties().into_iter().flatten().map(|(key, _)| key.to_owned());
            (source.to_owned(), name.to_owned(), properties.collect::<Vec<_>>())
        })
        .collect();
    emitted.extend(of_devices.map(|event| {
        let mut properties: Vec<_> = event.properties.iter().map(|key| (*key).to_owned()).collect();
        properties.sort();
        (event.source.to_owned(), event.name.to_owned(), properties)
    }));
    documented.sort();
    emitted.sort();
    assert_eq!(documented, emitted);
}
