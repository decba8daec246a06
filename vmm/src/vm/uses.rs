//! Files, devices and sockets that the VM's configuration and the VMM's flags name.

use std::path::{Path, PathBuf};

use foreshore_devices::events::EventMonitor;
use foreshore_devices::host_console::rotation_paths;
use foreshore_devices::standard_stream;

use crate::config::{
    ApiSocket, ConsoleConfig, ConsoleMode, DeviceConfig, DiskConfig, Launch, MetricsAddress,
    PmVolumeConfig, PmemConfig, VmConfig, VsockConfig,
};

/// One use of a file, device or socket, by a VM or by the VMM.
#[derive(Clone)]
pub(super) struct Use {
    /// Flag and key, with the path.
    pub(super) name: String,
    pub(super) path: PathBuf,
    pub(super) kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Disk, pmem file, memory zone or moved memory that the guest writes.
    Written,
    /// Disk, pmem file or memory zone that is only read.
    Read,
    /// Volume or memory in a pool.
    Pool,
    /// File that is read at each boot, for example a kernel.
    Boot,
    /// File that a console writes.
    Console,
    /// Name to which a console's file is renamed when it has reached its size limit.
    Rotated,
    /// Any other file that the VMM writes, or a socket.
    Output,
    /// Log or events on the VMM's standard output or standard error. The user may have redirected
    /// both to the same file.
    Stream,
    /// Socket of the vsock device. Port N of the host has a socket of its own, whose name ends in
    /// `_N`.
    Vsock,
}

impl Use {
    pub(super) fn new(flag: &str, path: &Path, kind: Kind) -> Self {
        Self { name: format!("{flag}={}", path.display()), path: path.to_owned(), kind }
    }
}

pub(super) fn uses_of_vmm(launch: &Launch) -> Vec<Use> {
    let mut uses = Vec::new();
    let kind_of =
        |path: &Path| if standard_stream::is_at(path) { Kind::Stream } else { Kind::Output };
    uses.extend(launch.log.file.as_deref().map(|path| Use::new("--log-file", path, kind_of(path))));
    match &launch.event_monitor {
        Some(EventMonitor::Path(path)) => {
            uses.push(Use::new("--event-monitor path", path, kind_of(path)))
        }
        Some(EventMonitor::Fd(fd)) => uses.push(Use {
            name: format!("--event-monitor fd={fd}"),
            path: format!("/proc/self/fd/{fd}").into(),
            kind: Kind::Output,
        }),
        None => {}
    }
    if let Some(ApiSocket::Path(path, _)) = &launch.api_socket {
        uses.push(Use::new("--api-socket path", path, Kind::Output));
    }
    if let Some(MetricsAddress::Unix(path, _)) = &launch.metrics {
        let name = format!("--metrics unix:{}", path.display());
        uses.push(Use { name, path: path.clone(), kind: Kind::Output });
    }
    uses
}

/// Objects in `config` that are opened for the life of the VM or at each boot.
pub(super) fn uses_of_vm(config: &VmConfig) -> Vec<Use> {
    let mut uses = Vec::new();
    for zone in &config.memory.zones {
        let kind = storage(!zone.host.shared);
        uses.extend(zone.file.as_deref().map(|path| Use::new("--memory-zone file", path, kind)));
    }
    uses.extend(
        config.pm_memory.iter().map(|zone| Use::new("--pm-memory pool", &zone.pool, Kind::Pool)),
    );
    let spills = config.pm_memory.iter().filter_map(|zone| zone.spill_file.as_deref());
    uses.extend(spills.map(|folder| Use::new("--pm-memory spill_file", folder, Kind::Written)));
    uses.extend(config.pm_volumes.iter().map(use_of_volume));
    uses.extend(config.disks.iter().map(use_of_disk));
    uses.extend(config.pmem.iter().map(use_of_pmem));
    let payload = &config.payload;
    let boot = [
        ("--kernel", &payload.kernel),
        ("--firmware", &payload.firmware),
        ("--initramfs", &payload.initramfs),
    ];
    let boot = boot.into_iter().filter_map(|(flag, path)| Some((flag, path.as_ref()?)));
    let boot = boot.chain([("--rng src", &config.rng.src)]);
    uses.extend(boot.map(|(flag, path)| Use::new(flag, path, Kind::Boot)));
    uses.extend(uses_of_console("--serial", &config.serial));
    uses.extend(uses_of_console("--console", &config.console));
    uses.extend(config.vsock.iter().map(use_of_vsock));
    let record = config.pressure.iter().filter_map(|pressure| pressure.record.as_deref());
    uses.extend(record.map(|path| Use::new("--pressure record", path, Kind::Output)));
    uses
}

/// Object that a removable device opens.
pub(super) fn use_of_device(device: &DeviceConfig) -> Option<Use> {
    match device {
        DeviceConfig::Disk(disk) => Some(use_of_disk(disk)),
        DeviceConfig::Pmem(pmem) => Some(use_of_pmem(pmem)),
        DeviceConfig::Volume(volume) => Some(use_of_volume(volume)),
        DeviceConfig::Vsock(vsock) => Some(use_of_vsock(vsock)),
        DeviceConfig::Net(_) => None,
    }
}

fn storage(only_reads: bool) -> Kind {
    if only_reads { Kind::Read } else { Kind::Written }
}

fn use_of_disk(disk: &DiskConfig) -> Use {
    Use::new("--disk path", &disk.path, storage(disk.readonly))
}

fn use_of_pmem(pmem: &PmemConfig) -> Use {
    Use::new("--pmem file", &pmem.file, storage(pmem.discard_writes))
}

fn use_of_volume(volume: &PmVolumeConfig) -> Use {
    Use::new("--pm-volume pool", &volume.pool, Kind::Pool)
}

fn use_of_vsock(vsock: &VsockConfig) -> Use {
    Use::new("--vsock socket", &vsock.socket, Kind::Vsock)
}

fn uses_of_console(flag: &str, console: &ConsoleConfig) -> Vec<Use> {
    let mut uses = Vec::new();
    match (console.mode, &console.file, &console.socket) {
        (ConsoleMode::File, Some(path), _) => {
            let file = Use::new(&format!("{flag} file"), path, Kind::Console);
            let is_limited = console.file_limits().max_bytes.is_some();
            let beside = rotation_paths(path).into_iter().filter(|_| is_limited).map(|path| Use {
                name: format!("{} (limited by max_size, with {})", file.name, path.display()),
                path,
                kind: Kind::Rotated,
            });
            uses.extend(beside);
            uses.push(file);
        }
        (ConsoleMode::Socket, _, Some(path)) => {
            uses.push(Use::new(&format!("{flag} socket"), path, Kind::Output));
        }
        _ => {}
    }
    uses
}
