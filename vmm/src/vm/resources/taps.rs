//! Network interfaces of the host that a VM uses. They outlive its machines.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use foreshore_devices::virtio::net::tap::{HostInterface, Tap, TapError, TapOptions, check_given};
use parking_lot::Mutex;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::config::{GivenFd, MacAddress, NetConfig, VmConfig};
use crate::vm::error::BuildError;

/// Interfaces of `--net`, in the order of the VM's configuration. Shared with the machine, which
/// adds and removes interfaces.
///
/// They stay open as long as the VM has them, because passed descriptors cannot be opened again.
/// Also, an interface that this process created remains, for example, a port of its bridge across a
/// reboot.
#[derive(Clone, Default)]
pub(crate) struct Taps(Arc<Mutex<Vec<NamedTap>>>);

/// Interface with its configuration.
pub(crate) type NamedTap = (NetConfig, Arc<Tap>);

impl Taps {
    /// Opens every interface of `config` that is not open yet. The previous machine has ended, so
    /// it no longer reads from the retained interfaces.
    pub(crate) fn open(&self, config: &VmConfig) -> Result<(), BuildError> {
        let mut taps = self.0.lock();
        // Interfaces that are not in `config` are closed first, because a new one may have the same
        // name. An interface that was deleted on the host is created again. Passed descriptors
        // cannot be opened again, so they are retained.
        taps.retain(|(earlier, tap)| {
            config.net.contains(earlier) && (!earlier.fds.is_empty() || tap.is_there())
        });
        let mut earlier = taps.clone();
        let mut opened = Vec::with_capacity(config.net.len());
        for net in &config.net {
            let retained = earlier.iter().position(|(config, _)| config == net);
            let tap = match retained {
                Some(nth) => earlier.remove(nth).1,
                None => open(net)?,
            };
            opened.push((net.clone(), tap));
        }
        *taps = opened;
        Ok(())
    }

    /// Retains the interface of an added device for the next machine.
    pub(crate) fn add(&self, config: &NetConfig, tap: Arc<Tap>) {
        self.0.lock().push((config.clone(), tap));
    }

    /// Releases the interface of the device `id`. It closes once the device has ended.
    pub(crate) fn remove(&self, id: &str) {
        self.0.lock().retain(|(config, _)| config.id.as_deref() != Some(id));
    }

    /// Closes the interfaces that are not in `config`. Must be called without a machine.
    pub(crate) fn retain(&self, config: &VmConfig) {
        self.0.lock().retain(|(earlier, _)| config.net.contains(earlier));
    }

    pub(crate) fn list(&self) -> Vec<NamedTap> {
        self.0.lock().clone()
    }
}

pub(in crate::vm) fn open(net: &NetConfig) -> Result<Arc<Tap>, BuildError> {
    let flag = format!("--net id={}", net.id.as_deref().unwrap_or_default());
    open_tap(net).map(Arc::new).map_err(BuildError::device(flag))
}

fn open_tap(config: &NetConfig) -> Result<Tap, TapError> {
    if !config.fds.is_empty() {
        return Tap::from_fds(&numbers(config), config.mtu);
    }
    Tap::open(&TapOptions {
        name: config.tap.clone(),
        pairs: config.pairs(),
        address: config.host_address(),
        host_mac: config.host_mac.map(MacAddress::bytes),
        mtu: config.mtu,
    })
}

fn numbers(config: &NetConfig) -> Vec<RawFd> {
    config.fds.iter().map(GivenFd::number).collect()
}

/// Refuses descriptors that a device could not use.
pub(crate) fn check(config: &NetConfig) -> Result<(), TapError> {
    check_given(&numbers(config)).map(drop)
}

/// Takes ownership of the descriptors from the command line. They are closed when the VM no longer
/// has their interface.
pub(crate) fn hold_named(config: &mut VmConfig) -> Result<(), TapError> {
    for net in &mut config.net {
        check(net)?;
        for fd in net.fds.iter_mut().filter(|fd| !fd.is_held()) {
            // No number is given twice (`NetConfig::validate`), and no other flag takes it
            // (`parse_command_line`).
            // SAFETY: `check` has seen a queue of a tap interface. This process has opened none
            // yet, so the descriptor is inherited and has no other owner.
            let owned = unsafe { OwnedFd::from_raw_fd(fd.number()) };
            *fd = GivenFd::from(owned);
        }
    }
    Ok(())
}

/// Returns a random, locally administered Ethernet address.
pub(crate) fn draw_address() -> MacAddress {
    let mut bytes = [0u8; 6];
    // getrandom(2) always fills up to 256 bytes, on every kernel that has KVM.
    assert_eq!(getrandom(&mut bytes, GetRandomFlags::empty()), Ok(6));
    MacAddress::local(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::config::test_config;

    #[test]
    fn drawn_addresses_differ() {
        assert_ne!(draw_address(), draw_address());
    }

    #[test]
    fn descriptor_that_is_no_tap_queue_is_refused() {
        let file = tempfile::tempfile().unwrap();
        let mut config = test_config();
        config.net = vec![NetConfig::parse(&format!("id=n,fd={}", file.as_raw_fd())).unwrap()];
        assert!(
            matches!(hold_named(&mut config), Err(TapError::NoTap { fd, .. }) if fd == file.as_raw_fd())
        );
        assert!(!config.net[0].fds[0].is_held());
        let taps = Taps::default();
        let message = foreshore_types::chain(&taps.open(&config).unwrap_err());
        assert!(message.starts_with("cannot set up --net id=n: fd "), "{message}");
        assert!(taps.list().is_empty());
        // `open`, and not `Taps::open`, serves interfaces that are added to a running machine.
        let added = open(&config.net[0]).unwrap_err();
        assert_eq!(foreshore_types::chain(&added), message);
    }
}
