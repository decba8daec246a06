//! Devices without options.

use std::collections::BTreeSet;

use clap::{Arg, ArgAction, ArgMatches};
use foreshore_config::{JsonError, JsonValue, Object, Walk};
use foreshore_devices::device::Switch;
use foreshore_devices::virtio;
use serde::ser::SerializeMap;
use serde_json::{Map, Value};

/// All devices without options, in the order of their PCI slots. Each device's folder contains its
/// description.
pub const SWITCHES: &[Switch] = &[virtio::watchdog::SWITCH, foreshore_devices::pvpanic::SWITCH];

/// Devices in [`SWITCHES`] that the VM has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Switches(BTreeSet<&'static str>);

impl Switches {
    /// Command line arguments for the switches.
    pub(super) fn args() -> impl Iterator<Item = Arg> {
        let arg = |switch: &Switch| Arg::new(switch.key).long(switch.key).help(switch.about);
        SWITCHES.iter().map(arg).map(|arg| arg.action(ArgAction::SetTrue).help_heading("Devices"))
    }

    pub(super) fn from_matches(matches: &ArgMatches) -> Self {
        let keys = SWITCHES.iter().map(|switch| switch.key);
        Self(keys.filter(|key| matches.get_flag(key)).collect())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Devices to build, in the order of their PCI slots.
    pub fn iter(&self) -> impl Iterator<Item = &'static Switch> {
        SWITCHES.iter().filter(|switch| self.0.contains(switch.key))
    }
}

impl Object for Switches {
    const FLAG: &'static str = "vm.create";

    fn names() -> Vec<&'static str> {
        SWITCHES.iter().map(|switch| switch.key).collect()
    }

    fn take(object: &mut Map<String, Value>, walk: &mut Walk) -> Result<Self, JsonError> {
        let mut given = BTreeSet::new();
        for Switch { key, .. } in SWITCHES {
            if walk.take(object, key)?.unwrap_or(false) {
                given.insert(*key);
            }
        }
        Ok(Self(given))
    }

    fn write<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        SWITCHES
            .iter()
            .try_for_each(|switch| map.serialize_entry(switch.key, &self.0.contains(switch.key)))
    }
}

impl JsonValue for Switches {
    fn from_json(json: Value, walk: &mut Walk) -> Result<Self, JsonError> {
        walk.object(json)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use foreshore_confinement::thread::ThreadKind;
    use foreshore_devices::device::testing::FakeMachine;
    use foreshore_devices::event_loop::EventLoop;
    use foreshore_devices::memory::view::GuestView;
    use vm_memory::GuestMemoryMmap;

    use super::*;

    /// Counts the constants `SWITCH` in the files below `folder`.
    fn descriptions(folder: &Path) -> usize {
        let count = |path: &Path| match path.is_dir() {
            true => descriptions(path),
            false => {
                let text = std::fs::read_to_string(path).unwrap();
                text.lines().filter(|line| line.starts_with("pub const SWITCH:")).count()
            }
        };
        std::fs::read_dir(folder).unwrap().map(|entry| count(&entry.unwrap().path())).sum()
    }

    #[test]
    fn every_switch_is_in_the_list() {
        let devices = Path::new(env!("CARGO_MANIFEST_DIR")).join("devices/src");
        assert_eq!(SWITCHES.len(), descriptions(&devices));
        let keys: BTreeSet<_> = SWITCHES.iter().map(|switch| switch.key).collect();
        assert_eq!(SWITCHES.len(), keys.len(), "no device is in the list twice");
    }

    #[test]
    fn document_lists_events_of_all_devices() {
        foreshore_devices::events::testing::check_document(
            SWITCHES.iter().flat_map(|switch| switch.events),
        );
    }

    #[test]
    fn each_device_is_built_with_its_id() {
        let (fake, event_loop) =
            (FakeMachine::default(), EventLoop::spawn(ThreadKind::Device, "test").unwrap());
        let view = GuestView::new(GuestMemoryMmap::new());
        let context = fake.context(view, event_loop.handle());
        for switch in SWITCHES {
            let device = (switch.build)(&context).unwrap();
            assert_eq!((device.id.clone(), device.removable), (switch.id(), None));
        }
        assert_eq!(context.pci.used(), 1, "only the host bridge is left");
    }
}
