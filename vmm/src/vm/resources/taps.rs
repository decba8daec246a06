//! Host network interfaces that a VM uses. They outlive the machines of the VM.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use foreshore_devices::virtio::net::tap::{HostInterface, Tap, TapError, TapOptions, check_given};
use parking_lot::Mutex;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::config::{GivenFd, MacAddress, NetConfig, VmConfig};
use crate::vm::error::BuildError;

/// Interfaces of `--net`, in the order of the VM's configuration. The machine shares the list, and
/// adds and removes interfaces.
///
/// They remain open as long as the VM has them, because inherited descriptors cannot be opened
/// again. In addition, an interface created by this process survives a reboot, and remains for
/// example a port of its bridge.
#[derive(Clone, Default)]
pub(crate) struct Taps(Arc<Mutex<Vec<NamedTap>>>);

/// Open interface with its configuration.
pub(crate) type NamedTap = (NetConfig, Arc<Tap>);

impl Taps {
    /// Opens every interface in `config` that is not open yet. The previous machine has ended, so
    /// it no longer reads from interfaces that remained open.
    pub(crate) fn open(&self, config: &VmConfig) -> Result<(), BuildError> {
        let mut taps = self.0.lock();
        // Interfaces that are not in `config` are closed first, because a new interface may have
        // the same name. If an interface was deleted on the host, it is created again. Inherited
        // descriptors cannot be opened again, so they remain open.
        taps.retain(|(earlier, tap)| {
            config.net.contains(earlier) && (!earlier.fds.is_empty() || tap.exists())
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

    /// Keeps the interface of an added device open for the next machine.
    pub(crate) fn add(&self, config: &NetConfig, tap: Arc<Tap>) {
        self.0.lock().push((config.clone(), tap));
    }

    /// Releases the interface of the device `id`. The interface is closed when the device has
    /// ended.
    pub(crate) fn remove(&self, id: &str) {
        self.0.lock().retain(|(config, _)| config.id.as_deref() != Some(id));
    }

    /// Closes the interfaces that are not in `config`. Must be called while no machine exists.
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

/// Refuses descriptors that a network device cannot use.
pub(crate) fn check(config: &NetConfig) -> Result<(), TapError> {
    check_given(&numbers(config)).map(drop)
}

/// Takes ownership of the descriptors on the command line. They are closed when the VM no longer
/// has the interface.
pub(crate) fn hold_named(config: &mut VmConfig) -> Result<(), TapError> {
    for net in &mut config.net {
        check(net)?;
        for fd in net.fds.iter_mut().filter(|fd| !fd.is_held()) {
            // No number occurs twice in the flag (`NetConfig::validate`) or in other flags
            // (`parse_command_line`). SAFETY: `check` has verified that the descriptor is a queue
            // of a tap interface. This process has not opened any tap queue yet, so the descriptor
            // is inherited and has no other owner.
            let owned = unsafe { OwnedFd::from_raw_fd(fd.number()) };
            *fd = GivenFd::from(owned);
        }
    }
    Ok(())
}

/// Returns a random MAC address that is locally administered.
pub(crate) fn draw_address() -> MacAddress {
    let mut bytes = [0u8; 6];
    // On every kernel that has KVM, getrandom(2) always fills requests of up to 256 bytes
    // completely.
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
        // Interfaces that are added to a running machine are opened by `open` instead of
        // `Taps::open`.
        let added = open(&config.net[0]).unwrap_err();
        assert_eq!(foreshore_types::chain(&added), message);
    }
}
