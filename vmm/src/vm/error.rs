//! Errors from building a machine.

use foreshore_devices::bus::BusError;
use foreshore_devices::disk::image::ImageError;
use foreshore_devices::event_loop::EventLoopError;
use foreshore_devices::pool::PoolError;
use foreshore_devices::unix_socket::UnixSocketError;
use foreshore_devices::virtio::net::tap::TapError;
use foreshore_devices::virtio::vsock::VsockError;
use foreshore_devices::volume::file::PmemFileError;
use foreshore_devices::volume::interface::InterfaceError;
use thiserror::Error;

use crate::acpi::AcpiError;
use crate::boot::BootError;
use crate::cpu::CpuError;
use crate::vm::kvm::KvmError;
use crate::vm::named_twice::NamedTwice;

/// Error from building a machine, by the part that failed.
#[derive(Debug, Error)]
pub(crate) enum BuildError {
    #[error(transparent)]
    Kvm(#[from] KvmError),
    #[error(transparent)]
    Boot(#[from] BootError),
    #[error(transparent)]
    Acpi(#[from] AcpiError),
    #[error(transparent)]
    Cpu(#[from] CpuError),
    #[error(transparent)]
    EventLoop(#[from] EventLoopError),
    #[error(transparent)]
    Bus(#[from] BusError),
    /// The chosen interface is not safe for the volume.
    #[error(transparent)]
    Interface(#[from] InterfaceError),
    #[error(transparent)]
    NamedTwice(#[from] NamedTwice),
    #[error("--kernel is missing: the VM has nothing to boot")]
    NoKernel,
    #[error("cannot set up {device}")]
    Device {
        device: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("--pressure")]
    Pressure(#[source] crate::governor::GovernorError),
}

/// Error of a pool or of a volume in it, and the command that helps.
#[derive(Debug, Error)]
#[error("{}{remedy}", foreshore_types::chain(error))]
struct FailedPool {
    // Printed with its causes, so that the command follows them.
    error: PoolError,
    remedy: &'static str,
}

impl BuildError {
    /// Returns a function that converts the error of a device.
    pub(crate) fn device<E>(device: impl Into<String>) -> impl FnOnce(E) -> Self
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let device = device.into();
        move |source| Self::Device { device, source: source.into() }
    }

    /// Returns a function that converts the error of a pool or of a volume in it. The error text
    /// names the command that helps.
    pub(crate) fn pool(device: impl Into<String>) -> impl FnOnce(PoolError) -> Self {
        let device = Self::device(device);
        move |err: PoolError| {
            let remedy = match &err {
                PoolError::Missing { .. } | PoolError::NotAPool { .. } => {
                    "; create the pool with `pmvol create`"
                }
                PoolError::Damaged { .. }
                | PoolError::SuperblocksDamaged { .. }
                | PoolError::DeviceUnknownVolumes { .. } => {
                    "; see `pmvol check` and `pmvol repair`"
                }
                PoolError::VolumeUnusable { .. } => "; see `pmvol check`",
                PoolError::InUse { .. } | PoolError::DeviceReadOnly { .. } => "; see `pmvol info`",
                PoolError::NoSuchVolume { .. } => "; create the volume with `pmvol volume create`",
                PoolError::PoolFull { .. } => {
                    "; grow the pool with `pmvol grow`, or reserve less with reserve="
                }
                _ => "",
            };
            device(FailedPool { error: err, remedy })
        }
    }

    /// Returns true if the file, interface or socket of a device is already in use.
    pub(crate) fn is_in_use(&self) -> bool {
        let Self::Device { source, .. } = self else { return false };
        let is_tap = matches!(
            source.downcast_ref(),
            Some(TapError::Attach { source, .. }) if source.raw_os_error() == Some(libc::EBUSY)
        );
        let is_image = matches!(
            source.downcast_ref(),
            Some(ImageError::InUse { .. } | ImageError::DeviceInUse { .. })
        );
        let is_pmem = matches!(
            source.downcast_ref(),
            Some(PmemFileError::InUse { .. } | PmemFileError::DeviceInUse { .. })
        );
        let is_socket = matches!(
            source.downcast_ref(),
            Some(VsockError::Socket(UnixSocketError::InUse { .. }))
        );
        let is_volume = matches!(
            source.downcast_ref(),
            Some(FailedPool { error: PoolError::VolumeInUse { .. }, .. })
        );
        is_tap || is_image || is_pmem || is_socket || is_volume
    }
}

#[cfg(test)]
mod tests {
    use foreshore_types::chain;

    use super::*;
    use crate::governor::GovernorError;

    #[test]
    fn error_of_the_governor_is_printed_once() {
        let err = BuildError::Pressure(GovernorError::NoSuchZone { id: "pm".to_owned() });
        assert_eq!(chain(&err), "--pressure: no resizable zone: \"pm\"; vm.memory lists the zones");
    }
}
