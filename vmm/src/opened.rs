//! First phase of the VMM, in which it opens the objects that it may be unable to open later. It
//! then drops its privileges and runs.
//!
//! | | Opened | Reason |
//! |---|---|---|
//! | Inherited descriptors | At the start. Those that no argument names are closed ([`inherited`]) | A guest that breaks out must not find them |
//! | KVM | At the start | The user need not be in the group kvm, and the folder of `--chroot` need not contain /dev/kvm |
//! | Taps and vhost-net of `--net` | At the start | Only CAP_NET_ADMIN may create taps |
//! | Sockets of the API and of metrics | At the start | They may be in a folder of root. A socket in use is found before anything is created |
//! | Priority of the governor | Permitted at the start | RLIMIT_NICE can be raised only with CAP_SYS_RESOURCE |
//! | Log, events, consoles, recordings, vsock | Later, by the user | They then belong to the user |
//! | Pools, images, kernels, memory files | At each boot, by the user | `pmvol` or a package manager may have replaced them. Landlock limits them |
//! | Added devices | When they are added, by the thread that builds VMs | It has the capabilities that are left. A failure is reported to the client |
//!
//! No privilege is needed for userfaultfd(2), because the VMM does not use it.

use std::ffi::OsString;

use foreshore_confinement::identity::{IdentityError, Ids, enter_root};
use foreshore_confinement::process;
use foreshore_devices::end_signals;
use foreshore_devices::unix_socket::{SocketAccess, UnixSocketError};
use thiserror::Error;

use crate::api::{Socket, SocketError};
use crate::config::{ApiSocket, Launch, MetricsAddress};
use crate::governor::task::NICE;
use crate::inherited::{self, InheritedError};
use crate::run::RunError;
use crate::vm::request::VmError;
use crate::vm::resources::host_devices::HostDevices;
use crate::vm::resources::taps;
use crate::vm::{NamedTwice, check_launch, vm_task};

/// Error in the command line that is found while the VMM opens its files.
#[derive(Debug, Error)]
pub enum OpenError {
    #[error(transparent)]
    Inherited(#[from] InheritedError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    NamedTwice(#[from] NamedTwice),
}

/// Everything that the VMM opens before it drops its privileges.
pub struct Opened {
    /// User and groups to become.
    pub ids: Ids,
    /// An error is reported only when the log is open.
    devices: Result<HostDevices, RunError>,
    sockets: Result<Sockets, SocketError>,
}

/// Sockets on which the VMM listens.
pub(crate) struct Sockets {
    pub(crate) api: Option<Socket>,
    pub(crate) metrics: Option<Socket>,
}

impl Opened {
    /// Opens everything, and changes the root folder in between: devices and names of users are
    /// those of the host, and paths are those of the new root folder.
    ///
    /// # Safety
    /// Must be called before the process opens any file or starts a thread ([`inherited::take`]).
    pub unsafe fn open(launch: &mut Launch, args: &[OsString]) -> Result<Self, OpenError> {
        // SAFETY: the caller guarantees that nothing has been opened.
        unsafe { inherited::take(launch, args)? };
        process::permit_nice(NICE);
        let ids = launch.identity.look_up()?;
        let groups = look_up_groups(launch);
        let devices = open_devices(launch);
        if let Some(root) = &launch.identity.root {
            enter_root(root)?;
        }
        check_launch(launch)?;
        // From here on, there are files to remove when a signal ends the VMM.
        end_signals::block();
        let sockets = groups.map_err(SocketError::Path).and_then(|()| Sockets::bind(launch, &ids));
        Ok(Self { ids, devices, sockets })
    }

    pub(crate) fn into_parts(self) -> Result<(HostDevices, Sockets), RunError> {
        Ok((self.devices?, self.sockets?))
    }
}

fn look_up_groups(launch: &mut Launch) -> Result<(), UnixSocketError> {
    let api = launch.api_socket.as_mut().and_then(ApiSocket::access_mut);
    let metrics = launch.metrics.as_mut().and_then(MetricsAddress::access_mut);
    for (flag, access) in [("--api-socket", api), ("--metrics", metrics)] {
        let Some(access) = access else { continue };
        access.look_up_group().map_err(|source| UnixSocketError::Group { flag, source })?;
    }
    Ok(())
}

fn open_devices(launch: &mut Launch) -> Result<HostDevices, RunError> {
    launch.config.as_mut().map_or(Ok(()), taps::hold_named)?;
    HostDevices::open(launch.config.as_mut()).map_err(|error| {
        let error = VmError::Failed(foreshore_types::chain(&error));
        RunError::Vm(vm_task::RunError::Boot(error))
    })
}

impl Sockets {
    fn bind(launch: &mut Launch, ids: &Ids) -> Result<Self, SocketError> {
        let api = launch.api_socket.as_ref().map(Socket::for_api).transpose()?;
        give(&api, launch.api_socket.as_mut().and_then(ApiSocket::access_mut), ids)?;
        let metrics = launch.metrics.as_ref().map(Socket::for_metrics).transpose()?;
        give(&metrics, launch.metrics.as_mut().and_then(MetricsAddress::access_mut), ids)?;
        Ok(Self { api, metrics })
    }
}

fn give(
    socket: &Option<Socket>,
    access: Option<&mut SocketAccess>,
    ids: &Ids,
) -> Result<(), SocketError> {
    match (socket, access) {
        (Some(socket), Some(access)) => socket.give_to(ids, access),
        _ => Ok(()),
    }
}
