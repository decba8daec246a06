//! Devices of the host that are opened before the VMM drops its privileges.

use std::sync::Arc;

use foreshore_devices::memory::holes::UserfaultDevice;
use foreshore_devices::virtio::net::VhostFiles;
use foreshore_devices::virtio::net::config::VhostMode;
use kvm_ioctls::Kvm;

use crate::config::{NetConfig, VmConfig};
use crate::vm::error::BuildError;
use crate::vm::resources::taps::{self, Taps};

/// Devices that remain open until the VMM ends. A VMM that has changed its user or its root folder
/// may be unable to open them again.
#[derive(Default)]
pub(crate) struct HostDevices {
    /// `None` if KVM cannot be opened. The next boot tries it again, and reports the error.
    pub(crate) kvm: Option<Arc<Kvm>>,
    /// Source of the faults of mapped thin volumes.
    pub(crate) userfaults: Arc<UserfaultDevice>,
    /// Interfaces of `--net`.
    pub(crate) taps: Taps,
    /// Files of vhost-net for these interfaces. If vhost-net is not usable, the next boot reports
    /// the error.
    pub(crate) vhost: VhostFiles,
}

impl HostDevices {
    /// Opens KVM, and the devices of a VM on the command line.
    pub(crate) fn open(config: Option<&mut VmConfig>) -> Result<Self, BuildError> {
        let mut devices = Self { kvm: Kvm::new().ok().map(Arc::new), ..Self::default() };
        if let Some(config) = config {
            // An interface remains open as long as its configuration is the same.
            config.address_devices(taps::draw_address);
            devices.taps.open(config)?;
            devices.vhost = vhost_files(&config.net);
        }
        Ok(devices)
    }
}

fn vhost_files(nets: &[NetConfig]) -> VhostFiles {
    let nets = nets.iter().filter(|net| net.vhost != VhostMode::Off);
    match nets.map(NetConfig::pairs).sum() {
        0 => VhostFiles::default(),
        pairs => VhostFiles::open(pairs).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use foreshore_devices::virtio::net::tap::HostInterface;

    use super::*;
    use crate::config::test_config;

    /// The test runs in its own network namespace.
    #[test]
    fn interface_of_the_command_line_is_opened_before_capabilities_are_dropped() {
        let test = || {
            // SAFETY: the call takes a number and changes only the namespace of this thread.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                return eprintln!("skipped: no network namespace (needs root)");
            }
            let mut config = test_config();
            config.net = vec![NetConfig::parse("tap=early,id=n").unwrap()];
            let devices = match HostDevices::open(Some(&mut config)) {
                Err(error) => return eprintln!("skipped: {}", foreshore_types::chain(&error)),
                Ok(devices) => devices,
            };
            let none = rustix::thread::CapabilitySet::empty();
            let sets = rustix::thread::CapabilitySets {
                effective: none,
                permitted: none,
                inheritable: none,
            };
            rustix::thread::set_capabilities(None, sets).unwrap();
            devices.taps.open(&config).unwrap();
            assert!(devices.taps.list()[0].1.exists());
            // An interface that is added later cannot be created.
            config.net = vec![NetConfig::parse("tap=late,id=n").unwrap()];
            let error = foreshore_types::chain(&devices.taps.open(&config).unwrap_err());
            let remedy =
                "create it for this user, name it in --net at the start, or pass it as fd=";
            assert!(error.contains("CAP_NET_ADMIN") && error.contains(remedy), "{error}");
        };
        std::thread::spawn(test).join().unwrap();
    }
}
