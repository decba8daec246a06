//! Tests of adding and removing devices, before and after boot.

use super::*;
use crate::config::{PmVolumeConfig, VolumeInterface};

fn disk(text: &str) -> Box<DeviceConfig> {
    Box::new(DeviceConfig::Disk(crate::config::DiskConfig::parse(text).unwrap()))
}

async fn add(vm: &Fixture, text: &str) -> Result<Option<PciDeviceInfo>, VmError> {
    vm.handle.ask(|reply| VmRequest::AddDevice(disk(text), reply)).await
}

async fn remove(vm: &Fixture, id: &str) -> Result<(), VmError> {
    vm.handle.ask(|reply| VmRequest::RemoveDevice(id.to_owned(), reply)).await
}

async fn disk_ids(vm: &Fixture) -> Vec<Option<String>> {
    let info = vm.handle.ask(VmRequest::Info).await.unwrap();
    info.config.disks.into_iter().map(|disk| disk.id).collect()
}

#[test]
fn devices_of_stopped_vm_are_in_its_configuration() {
    run(async {
        let vm = serve(None, None, AtGuestShutdown::End);
        assert!(matches!(add(&vm, "path=/d").await, Err(VmError::NotCreated)));
        assert!(matches!(remove(&vm, "d").await, Err(VmError::NotCreated)));
        vm.handle.ask(|reply| VmRequest::Create(Box::new(test_config()), reply)).await.unwrap();
        assert_eq!(add(&vm, "path=/d,id=d").await.unwrap(), None);
        assert!(matches!(add(&vm, "path=/e,id=d").await, Err(VmError::Config(_))));
        assert!(matches!(add(&vm, "path=/e,num_queues=9").await, Err(VmError::Config(_))));
        assert_eq!(disk_ids(&vm).await, [Some("d".to_owned())]);
        assert!(matches!(remove(&vm, "x").await, Err(VmError::NoSuchDevice { .. })));
        remove(&vm, "d").await.unwrap();
        assert_eq!(disk_ids(&vm).await, []);
        // The open files of the device were closed.
        assert_eq!(vm.log(), ["keep"]);
    });
}

/// Network interface with this end of a pipe as its only queue.
fn net_of(text: &str, fd: std::os::fd::OwnedFd) -> Box<DeviceConfig> {
    let mut net = crate::config::NetConfig::parse(text).unwrap();
    net.fds = vec![fd.into()];
    Box::new(DeviceConfig::Net(net))
}

/// Returns true while the other end of the pipe is open.
fn is_open(reader: &mut std::io::PipeReader) -> bool {
    rustix::io::ioctl_fionbio(&*reader, true).unwrap();
    std::io::Read::read(reader, &mut [0]).is_err()
}

#[test]
fn descriptors_of_interface_survive_reboot_and_close_on_removal() {
    run(async {
        let vm = serve(None, None, AtGuestShutdown::End);
        vm.handle.ask(|reply| VmRequest::Create(Box::new(test_config()), reply)).await.unwrap();
        let add = async |text, fd| {
            vm.handle.ask(|reply| VmRequest::AddDevice(net_of(text, fd), reply)).await
        };
        let (mut reader, writer) = std::io::pipe().unwrap();
        assert_eq!(add("id=n", writer.into()).await.unwrap(), None);
        let net = async || vm.handle.ask(VmRequest::Info).await.unwrap().config.net;
        let given = net().await;
        assert!(given[0].mac.is_some() && given[0].fds.len() == 1);
        vm.handle.ask(VmRequest::Boot).await.unwrap();
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        assert_eq!(net().await, given);
        assert!(is_open(&mut reader));
        // The descriptors of a refused interface are closed.
        let (mut other, writer) = std::io::pipe().unwrap();
        assert!(matches!(add("id=n", writer.into()).await, Err(VmError::Config(_))));
        assert!(!is_open(&mut other));
        let (mut other, writer) = std::io::pipe().unwrap();
        assert!(matches!(add("queue_size=32", writer.into()).await, Err(VmError::BadRequest(_))));
        assert!(!is_open(&mut other));
        drop(given);
        remove(&vm, "n").await.unwrap();
        assert_eq!(net().await, []);
        assert!(!is_open(&mut reader));
        // The descriptors of a deleted VM are closed too.
        let (mut reader, writer) = std::io::pipe().unwrap();
        assert!(add("", writer.into()).await.unwrap().is_some());
        assert!(is_open(&mut reader));
        vm.handle.ask(VmRequest::Delete).await.unwrap();
        assert!(!is_open(&mut reader));
    });
}

#[test]
fn info_shows_device_tree_while_there_is_a_machine() {
    run(async {
        let vm = start(None).await;
        let tree = async || vm.handle.ask(VmRequest::Info).await.unwrap().device_tree;
        let found = serde_json::to_value(tree().await).unwrap();
        let expected = serde_json::json!({
            "_disk1": {"id": "_disk1", "resources": [], "parent": "_virtio-pci-_disk1", "children": [], "pci_bdf": null},
            "_virtio-pci-_disk1":
                {"id": "_virtio-pci-_disk1", "resources": [], "parent": null, "children": ["_disk1"], "pci_bdf": "0000:00:04.0"},
        });
        assert_eq!(found, expected);
        vm.handle.ask(VmRequest::Shutdown).await.unwrap();
        assert_eq!(tree().await, None);
    });
}

#[test]
fn volume_of_running_vm_has_its_interface_at_the_next_boot() {
    run(async {
        let vm = start(None).await;
        let add = async |text: &str| {
            let volume = PmVolumeConfig::parse(&format!("pool=/p,{text}")).unwrap();
            let device = Box::new(DeviceConfig::Volume(volume));
            vm.handle.ask(|reply| VmRequest::AddDevice(device, reply)).await
        };
        let volumes = async || {
            let config = vm.handle.ask(VmRequest::Info).await.unwrap().config;
            let volumes = config.pm_volumes.into_iter();
            volumes.map(|volume| (volume.name, volume.interface)).collect::<Vec<_>>()
        };
        let error = add("name=data,interface=nvdimm").await.unwrap_err();
        assert!(matches!(&error, VmError::BadRequest(text) if text.contains("only at boot")));
        assert_eq!(add("name=data").await.unwrap().unwrap().id, "data");
        assert_eq!(add("name=raw,format=raw").await.unwrap().unwrap().id, "pmem-raw");
        assert!(matches!(add("name=data").await, Err(VmError::Config(_))));
        let data = ("data".to_owned(), VolumeInterface::VirtioBlk);
        let raw = ("raw".to_owned(), VolumeInterface::VirtioPmem);
        assert_eq!(volumes().await, [data, raw.clone()]);
        remove(&vm, "data").await.unwrap();
        assert_eq!(volumes().await, [raw]);
    });
}

#[test]
fn devices_added_to_running_vm_are_in_next_boot() {
    run(async {
        let vm = start(None).await;
        let info = add(&vm, "path=/d").await.unwrap().unwrap();
        assert_eq!(info, PciDeviceInfo { id: "_disk0".to_owned(), bdf: "0000:00:05.0".to_owned() });
        // A device that the machine refuses is not added to the configuration either.
        assert!(matches!(add(&vm, "path=/missing,id=m").await, Err(VmError::Failed(_))));
        assert!(matches!(add(&vm, "path=/e,id=_disk0").await, Err(VmError::Config(_))));
        assert_eq!(disk_ids(&vm).await, [Some("_disk0".to_owned())]);
        // A paused VM also accepts devices, and the configuration changes without waiting for the
        // guest.
        let _ = vm.handle.ask(VmRequest::Pause).await;
        assert!(add(&vm, "path=/e,id=e").await.unwrap().is_some());
        remove(&vm, "_disk0").await.unwrap();
        assert_eq!(disk_ids(&vm).await, [Some("e".to_owned())]);
        // The guest still has a removed device, so its ID is not reused.
        for id in ["_disk0", "_disk2"] {
            assert_eq!(add(&vm, "path=/f").await.unwrap().unwrap().id, id);
        }
        for id in ["_disk0", "_disk2"] {
            remove(&vm, id).await.unwrap();
        }
        // A removal may be repeated until the device is gone, because the machine still has the
        // device.
        remove(&vm, "_disk0").await.unwrap();
        assert!(matches!(remove(&vm, "nobody").await, Err(VmError::NoSuchDevice { .. })));
        vm.send(0, MachineEvent::Ejected { slot: 5 });
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        // Event from a machine that has been replaced.
        vm.send(0, MachineEvent::Ejected { slot: 5 });
        assert_eq!(disk_ids(&vm).await, [Some("e".to_owned())]);
        assert_eq!(vm.log().iter().filter(|entry| **entry == "ejected").count(), 1);
    });
}
