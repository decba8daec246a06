//! Makes all calls with the crate cloud-hypervisor-client, whose types parse responses strictly.

use std::future::Future;

use anyhow::{Context, Result, bail, ensure};
use cloud_hypervisor_client::apis::{DefaultApi, Error};
use cloud_hypervisor_client::models::{
    ConsoleConfig, ConsoleMode, CpusConfig, DeviceConfig, DiskConfig, FsConfig,
    GenericVhostUserConfig, ImageType, MemoryConfig, NetConfig, PayloadConfig, PmemConfig,
    ReceiveMigrationData, RestoreConfig, RngConfig, SendMigrationData, SerialConfig, VdpaConfig,
    VmAddUserDevice, VmConfig, VmCoredumpData, VmRemoveDevice, VmResize, VmResizeDisk,
    VmResizeZone, VmSnapshotConfig, VmState, VsockConfig,
};
use cloud_hypervisor_client::{SocketBasedApiClient, socket_based_api_client};

use crate::vm::{POLL_INTERVAL, TIMEOUT, UntilUp, Vm};

const MIB: i64 = 1 << 20;
const BOOT_BYTES: i64 = 512 * MIB;
const HOTPLUG_BYTES: i64 = 256 * MIB;

/// API client with a list of the calls that it has made.
struct Calls {
    api: SocketBasedApiClient,
    made: Vec<&'static str>,
}

type Answer<T> = std::result::Result<T, Error>;

impl Calls {
    /// Makes a call that should succeed.
    async fn ok<T>(
        &mut self,
        call: &'static str,
        answer: impl Future<Output = Answer<T>>,
    ) -> Result<T> {
        self.made.push(call);
        answer.await.with_context(|| call)
    }

    /// Makes a call that should fail with this status.
    async fn refused<T>(
        &mut self,
        call: &'static str,
        status: u16,
        answer: impl Future<Output = Answer<T>>,
    ) -> Result<()> {
        self.made.push(call);
        match answer.await {
            Err(Error::Api(error)) if error.code.as_u16() == status => {
                let messages: Vec<String> =
                    serde_json::from_str(&error.body).with_context(|| error.body)?;
                ensure!(!messages.is_empty(), "{call}: the refusal has no reason");
                Ok(())
            }
            Err(error) => bail!("{call}: {error} instead of {status}"),
            Ok(_) => bail!("{call} succeeded instead of returning {status}"),
        }
    }

    /// Adds a device to a VM that is not running. The response is 204 without a body, and this
    /// client cannot parse it.
    async fn cold<T>(
        &mut self,
        call: &'static str,
        answer: impl Future<Output = Answer<T>>,
    ) -> Result<()> {
        self.made.push(call);
        match answer.await {
            Err(Error::Serde(error)) if error.is_eof() => Ok(()),
            Err(error) => bail!("{call}: {error}"),
            Ok(_) => bail!("{call} returned a body as for a running VM"),
        }
    }

    async fn state(&mut self, expected: VmState) -> Result<()> {
        let info = self.ok("vm.info", self.api.vm_info_get()).await?;
        ensure!(info.state == expected, "The VM is {:?} instead of {expected:?}", info.state);
        Ok(())
    }

    async fn until<F: Future<Output = Result<bool>>>(
        &self,
        description: &str,
        is_met: impl Fn() -> F,
    ) -> Result<()> {
        let polls = async {
            while !is_met().await? {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            Ok(())
        };
        tokio::time::timeout(TIMEOUT, polls)
            .await
            .with_context(|| format!("Timed out waiting until {description}"))?
    }

    async fn wait_until_size(&self, bytes: i64) -> Result<()> {
        self.until(&format!("the VM has {bytes} bytes"), async || {
            Ok(self.api.vm_info_get().await?.memory_actual_size == Some(bytes))
        })
        .await
    }
}

fn config(vm: &Vm) -> VmConfig {
    let payload = PayloadConfig {
        kernel: Some(Vm::text(&vm.kernel)),
        initramfs: Some(Vm::text(&vm.initramfs)),
        cmdline: Some(Vm::CMDLINE.to_owned()),
        ..Default::default()
    };
    let memory = MemoryConfig {
        hotplug_method: Some("VirtioMem".to_owned()),
        hotplug_size: Some(HOTPLUG_BYTES),
        shared: Some(false),
        hugepages: Some(false),
        thp: Some(true),
        ..MemoryConfig::new(BOOT_BYTES)
    };
    VmConfig {
        cpus: Some(CpusConfig {
            kvm_hyperv: Some(false),
            nested: Some(true),
            ..CpusConfig::new(1, 1)
        }),
        memory: Some(memory),
        disks: Some(vec![disk(vm, 0)]),
        rng: Some(RngConfig { iommu: Some(false), ..RngConfig::new("/dev/urandom".to_owned()) }),
        serial: Some(SerialConfig {
            file: Some(Vm::text(&vm.console)),
            ..SerialConfig::new(ConsoleMode::File)
        }),
        console: Some(ConsoleConfig { iommu: Some(false), ..ConsoleConfig::new(ConsoleMode::Off) }),
        ..VmConfig::new(payload)
    }
}

fn disk(vm: &Vm, index: usize) -> DiskConfig {
    DiskConfig {
        path: Some(Vm::text(&vm.disks[index])),
        readonly: Some(false),
        direct: Some(false),
        iommu: Some(false),
        num_queues: Some(1),
        queue_size: Some(128),
        vhost_user: Some(false),
        pci_segment: Some(0),
        sparse: Some(true),
        image_type: Some(ImageType::Raw),
        id: Some(format!("disk{index}")),
        ..DiskConfig::new()
    }
}

/// Makes all existing calls, and returns their names.
pub async fn run(vm: &Vm, until_up: UntilUp<'_>) -> Result<Vec<&'static str>> {
    let mut calls = Calls { api: socket_based_api_client(&vm.api_socket), made: Vec::new() };
    let ping = calls.ok("vmm.ping", calls.api.vmm_ping_get()).await?;
    ensure!(ping.pid.is_some() && !ping.version.is_empty(), "{ping:?}");
    calls.refused("vm.info", 404, calls.api.vm_info_get()).await?;
    unsupported_calls(&mut calls).await?;
    created(&mut calls, vm).await?;
    calls.ok("vm.boot", calls.api.boot_vm()).await?;
    until_up()?;
    running(&mut calls, vm).await?;
    calls.ok("vm.reboot", calls.api.reboot_vm()).await?;
    until_up()?;
    calls.state(VmState::Running).await?;
    ended(&mut calls).await?;
    Ok(calls.made)
}

/// Makes calls that fail in any state of the VM.
async fn unsupported_calls(calls: &mut Calls) -> Result<()> {
    let path = || "/nonexistent".to_owned();
    calls
        .refused("vm.add-device", 501, calls.api.vm_add_device_put(DeviceConfig::default()))
        .await?;
    let fs = FsConfig::new("tag".to_owned(), path(), 1, 1024);
    calls.refused("vm.add-fs", 501, calls.api.vm_add_fs_put(fs)).await?;
    let generic = GenericVhostUserConfig::default();
    let generic = calls.api.vm_add_generic_vhost_user_put(generic);
    calls.refused("vm.add-generic-vhost-user", 501, generic).await?;
    let user = calls.api.vm_add_user_device_put(VmAddUserDevice::new(path()));
    calls.refused("vm.add-user-device", 501, user).await?;
    calls
        .refused("vm.add-vdpa", 501, calls.api.vm_add_vdpa_put(VdpaConfig::new(path(), 1)))
        .await?;
    calls.refused("vm.coredump", 501, calls.api.vm_coredump_put(VmCoredumpData::default())).await?;
    let receive = ReceiveMigrationData::new("unix:/nonexistent".to_owned());
    calls.refused("vm.receive-migration", 501, calls.api.vm_receive_migration_put(receive)).await?;
    let restore = RestoreConfig::new("file:///nonexistent".to_owned());
    calls.refused("vm.restore", 501, calls.api.vm_restore_put(restore)).await?;
    let send = SendMigrationData::new("unix:/nonexistent".to_owned());
    calls.refused("vm.send-migration", 501, calls.api.vm_send_migration_put(send)).await?;
    calls.refused("vm.snapshot", 501, calls.api.vm_snapshot_put(VmSnapshotConfig::default())).await
}

async fn created(calls: &mut Calls, vm: &Vm) -> Result<()> {
    calls.ok("vm.create", calls.api.create_vm(config(vm))).await?;
    calls.state(VmState::Created).await?;
    calls.refused("vm.create", 405, calls.api.create_vm(config(vm))).await?;
    calls.refused("vm.pause", 405, calls.api.pause_vm()).await?;
    let vsock = VsockConfig { iommu: Some(false), ..VsockConfig::new(3, Vm::text(&vm.vsock)) };
    calls.cold("vm.add-vsock", calls.api.vm_add_vsock_put(vsock)).await
}

async fn running(calls: &mut Calls, vm: &Vm) -> Result<()> {
    calls.state(VmState::Running).await?;
    let counters = calls.ok("vm.counters", calls.api.vm_counters_get()).await?;
    ensure!(
        counters.get("disk0").is_some_and(|disk| disk.contains_key("read_bytes")),
        "{counters:?}"
    );

    let resize = VmResize { desired_ram: Some(BOOT_BYTES + HOTPLUG_BYTES), ..Default::default() };
    calls.ok("vm.resize", calls.api.vm_resize_put(resize)).await?;
    calls.wait_until_size(BOOT_BYTES + HOTPLUG_BYTES).await?;
    let zone = VmResizeZone { id: Some("dram".to_owned()), desired_ram: Some(BOOT_BYTES) };
    calls.ok("vm.resize-zone", calls.api.vm_resize_zone_put(zone)).await?;
    calls.wait_until_size(BOOT_BYTES).await?;
    let resize = VmResizeDisk { id: Some("disk0".to_owned()), desired_size: Some(128 * MIB) };
    calls.ok("vm.resize-disk", calls.api.vm_resize_disk_put(resize)).await?;

    let added = calls.ok("vm.add-disk", calls.api.vm_add_disk_put(disk(vm, 1))).await?;
    ensure!(added.id == "disk1" && added.bdf.starts_with("0000:00:"), "{added:?}");
    // No tap is named, so the VMM creates one.
    let net = NetConfig { iommu: Some(false), vhost_user: Some(false), ..NetConfig::new() };
    let net = calls.ok("vm.add-net", calls.api.vm_add_net_put(net)).await?;
    let pmem = PmemConfig { iommu: Some(false), ..PmemConfig::new(Vm::text(&vm.pmem)) };
    let pmem = calls.ok("vm.add-pmem", calls.api.vm_add_pmem_put(pmem)).await?;
    for id in [added.id, net.id, pmem.id] {
        let remove = VmRemoveDevice { id: Some(id.clone()) };
        calls.ok("vm.remove-device", calls.api.vm_remove_device_put(remove)).await?;
        // The configuration changes immediately. The device tree contains the device until the
        // guest has ejected it.
        let is_gone = async || {
            let tree = calls.api.vm_info_get().await?.device_tree.unwrap_or_default();
            Ok(!tree.contains_key(&id))
        };
        calls.until(&format!("{id} is removed"), is_gone).await?;
    }

    calls.ok("vm.pause", calls.api.pause_vm()).await?;
    calls.state(VmState::Paused).await?;
    calls.refused("vm.pause", 405, calls.api.pause_vm()).await?;
    calls.ok("vm.resume", calls.api.resume_vm()).await?;
    // Earlier versions of the API description use this name.
    calls.ok("vm.nmi", calls.api.vmm_nmi_put()).await
}

async fn ended(calls: &mut Calls) -> Result<()> {
    // A paused guest does not notice the power button until it resumes, so it does not shut down in
    // the meantime.
    calls.ok("vm.pause", calls.api.pause_vm()).await?;
    calls.ok("vm.power-button", calls.api.power_button_vm()).await?;
    calls.ok("vm.shutdown", calls.api.shutdown_vm()).await?;
    calls.state(VmState::Created).await?;
    calls.ok("vm.delete", calls.api.delete_vm()).await?;
    calls.refused("vm.info", 404, calls.api.vm_info_get()).await?;
    calls.ok("vmm.shutdown", calls.api.shutdown_vmm()).await
}
