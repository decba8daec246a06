//! Tests of resizes of memory and vCPUs, and of their effect on the next boot.

use super::*;
use crate::config::{BalloonConfig, MemoryConfig, PmMemoryConfig, PmVolumeConfig, VolumeSize};

#[test]
fn resize_after_shutdown_applies_to_next_boot() {
    run(async {
        let vm = start(None).await;
        vm.handle.ask(VmRequest::Shutdown).await.unwrap();
        assert_eq!(vm.state().await, VmState::Created);
        let resize = ResizeRequest { desired_ram: Some(1 << 30), ..Default::default() };
        vm.handle.ask(|reply| VmRequest::Resize(Resize::Vm(resize), reply)).await.unwrap();
        assert_eq!(vm.handle.ask(VmRequest::Info).await.unwrap().config.memory.size, 1 << 30);
        vm.handle.ask(VmRequest::Boot).await.unwrap();
        assert_eq!(vm.state().await, VmState::Running);
    });
}

#[test]
fn resize_of_stopped_vm_changes_its_configuration() {
    run(async {
        let vm = serve(None, None, AtGuestShutdown::End);
        vm.handle.ask(|reply| VmRequest::Create(test_config().into(), reply)).await.unwrap();
        let resize = async |resize: ResizeRequest| {
            vm.handle.ask(|reply| VmRequest::Resize(Resize::Vm(resize), reply)).await
        };
        let more = ResizeRequest {
            desired_ram: Some(1 << 30),
            desired_vcpus: Some(1),
            desired_balloon: Some(0),
        };
        resize(more).await.unwrap();
        let info = vm.handle.ask(VmRequest::Info).await.unwrap();
        assert_eq!((info.config.memory.size, info.memory_actual_size), (1 << 30, 1 << 30));
        // A resize is applied completely or not at all, and its errors quote the request.
        for ((desired_vcpus, desired_ram, desired_balloon), emitted) in [
            ((Some(3), None, None), "vm.resize: desired_vcpus is 3, and must be 1"),
            ((Some(0), Some(1 << 30), None), "vm.resize: desired_vcpus is 0, and must be 1"),
            ((None, Some(2 << 30), Some(1 << 30)), "balloon 1 GiB: the VM has no balloon"),
            (
                (Some(1), Some(0), None),
                "vCPUs 1, memory 0: --memory: size is 0, and must be at least 4 KiB",
            ),
        ] {
            let wrong = ResizeRequest { desired_ram, desired_vcpus, desired_balloon };
            let error = resize(wrong).await.unwrap_err();
            assert!(matches!(error, VmError::BadRequest(_) | VmError::Config(_)));
            assert_eq!(error.to_string(), emitted);
        }
        let zone = ResizeZoneRequest { id: "pm".to_owned(), desired_ram: 0 };
        let refused = vm.handle.ask(|reply| VmRequest::Resize(Resize::Zone(zone), reply)).await;
        assert!(matches!(refused, Err(VmError::BadRequest(_))));
        assert_eq!(vm.handle.ask(VmRequest::Info).await.unwrap().config.memory.size, 1 << 30);
        assert!(vm.log().is_empty());
    });
}

#[test]
fn memory_added_by_acpi_is_boot_memory_of_next_boot() {
    run(async {
        let mut config = test_config();
        config.memory = MemoryConfig::parse("size=512M,hotplug_size=1G").unwrap();
        let vm = serve(None, Some(config), AtGuestShutdown::End);
        let resize = async |bytes| {
            let resize = ResizeRequest { desired_ram: Some(bytes), ..ResizeRequest::default() };
            vm.handle.ask(|reply| VmRequest::Resize(Resize::Vm(resize), reply)).await
        };
        let size = async || vm.handle.ask(VmRequest::Info).await.unwrap().config.memory.size;
        for bytes in [1 << 30, 256 << 20] {
            resize(bytes).await.unwrap();
            assert_eq!(size().await, bytes);
        }
        // A size with which the VM could not boot is refused without a call to the machine.
        assert!(matches!(resize(5000).await, Err(VmError::BadRequest(_))));
        assert_eq!(size().await, 256 << 20);
        assert_eq!(vm.log(), ["build", "resume", "resize dram", "resize dram"]);
    });
}

#[test]
fn resize_of_pm_keeps_boot_memory_of_next_boot() {
    run(async {
        for memory in ["size=512M", "size=512M,hotplug_size=1G"] {
            let mut config = test_config();
            config.memory = MemoryConfig::parse(memory).unwrap();
            config.pm_memory = vec![PmMemoryConfig::parse("pool=/pool,size=8G").unwrap()];
            let vm = serve(None, Some(config.clone()), AtGuestShutdown::End);
            for bytes in [8 << 30, 0] {
                let zone = ResizeZoneRequest { id: "pm".to_owned(), desired_ram: bytes };
                vm.handle.ask(|reply| VmRequest::Resize(Resize::Zone(zone), reply)).await.unwrap();
                vm.handle.ask(VmRequest::Reboot).await.unwrap();
                let info = vm.handle.ask(VmRequest::Info).await.unwrap();
                assert_eq!(info.config.memory, config.memory, "{memory}, PM of {bytes} bytes");
            }
        }
    });
}

#[test]
fn configuration_stores_requested_vcpus() {
    run(async {
        let mut config = test_config();
        config.cpus.max_vcpus = 4;
        let vm = serve(None, Some(config), AtGuestShutdown::End);
        let resize = async |vcpus| {
            let resize = ResizeRequest { desired_vcpus: Some(vcpus), ..ResizeRequest::default() };
            vm.handle.ask(|reply| VmRequest::Resize(Resize::Vm(resize), reply)).await
        };
        let count = async || vm.handle.ask(VmRequest::Info).await.unwrap().config.cpus.boot_vcpus;
        resize(4).await.unwrap();
        assert_eq!(count().await, 4);
        for wrong in [0, 5, 255] {
            let refused = resize(wrong).await.unwrap_err().to_string();
            assert_eq!(refused, format!("vm.resize: desired_vcpus is {wrong}, and must be 1 to 4"));
        }
        assert!(matches!(resize(3).await, Err(VmError::VcpusLeaving { .. })));
        assert_eq!(count().await, 4);
        vm.send(0, MachineEvent::VcpuEjected { index: 2 });
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        // Event from a machine that has been replaced.
        vm.send(0, MachineEvent::VcpuEjected { index: 1 });
        assert_eq!(count().await, 4);
        let expected = "build, resume, resize vcpus, vcpu ejected, drop, build, resume";
        assert_eq!(vm.log().join(", "), expected);
    });
}

#[test]
fn next_boot_has_requested_balloon() {
    run(async {
        let mut config = test_config();
        config.balloon = Some(BalloonConfig::parse("size=0").unwrap());
        let vm = serve(None, Some(config), AtGuestShutdown::End);
        let resize = ResizeRequest { desired_balloon: Some(64 << 20), ..ResizeRequest::default() };
        vm.handle.ask(|reply| VmRequest::Resize(Resize::Vm(resize), reply)).await.unwrap();
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        let config = vm.handle.ask(VmRequest::Info).await.unwrap().config;
        assert_eq!(config.balloon.unwrap().size, 64 << 20);
    });
}

#[test]
fn resize_with_balloon_too_large_for_next_boot_is_refused() {
    run(async {
        let config = || {
            let mut config = test_config();
            config.memory = MemoryConfig::parse("size=512M,hotplug_size=1G").unwrap();
            config.balloon = Some(BalloonConfig::parse("size=0").unwrap());
            config
        };
        let wish = |ram_mib: Option<u64>, balloon_mib: Option<u64>| ResizeRequest {
            desired_ram: ram_mib.map(|mib| mib << 20),
            desired_balloon: balloon_mib.map(|mib| mib << 20),
            ..ResizeRequest::default()
        };
        // The balloon leaves at least a quarter of the boot memory to the guest. Only the last
        // request in each row is refused.
        let rows = [
            vec![wish(Some(256), Some(300))],
            vec![wish(Some(256), None), wish(None, Some(300))],
            vec![wish(None, Some(300)), wish(Some(256), None)],
            vec![wish(Some(1024), Some(600)), wish(Some(512), None)],
        ];
        for row in rows {
            let vm = serve(None, Some(config()), AtGuestShutdown::End);
            let resize = async |resize: ResizeRequest| {
                vm.handle.ask(|reply| VmRequest::Resize(Resize::Vm(resize), reply)).await
            };
            let (last, first) = row.split_last().unwrap();
            for wish in first {
                resize(wish.clone()).await.unwrap();
            }
            let before = vm.handle.ask(VmRequest::Info).await.unwrap().config;
            let refused = resize(last.clone()).await;
            assert!(matches!(refused, Err(VmError::BadRequest(_))), "{row:?}");
            let after = vm.handle.ask(VmRequest::Info).await.unwrap().config;
            assert_eq!(after, before, "{row:?}");
            assert_eq!(after.validate(), Ok(()), "{row:?}");
        }
        // One request may deflate the balloon and also shrink the memory.
        let vm = serve(None, Some(config()), AtGuestShutdown::End);
        for wish in [wish(None, Some(300)), wish(Some(256), Some(0))] {
            vm.handle.ask(|reply| VmRequest::Resize(Resize::Vm(wish), reply)).await.unwrap();
        }
        assert_eq!(vm.handle.ask(VmRequest::Info).await.unwrap().config.validate(), Ok(()));
    });
}

#[test]
fn paused_vm_is_resized_and_stays_paused() {
    run(async {
        let mut config = test_config();
        config.cpus.max_vcpus = 4;
        config.memory.hotplug_size = Some(1 << 30);
        config.pm_memory = vec![PmMemoryConfig::parse("pool=/pool,size=1G").unwrap()];
        let vm = serve(None, Some(config), AtGuestShutdown::End);
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        let resize = ResizeRequest {
            desired_ram: Some(1 << 30),
            desired_vcpus: Some(2),
            desired_balloon: Some(0),
        };
        vm.handle.ask(|reply| VmRequest::Resize(Resize::Vm(resize), reply)).await.unwrap();
        let zone = ResizeZoneRequest { id: "pm".to_owned(), desired_ram: 1 << 30 };
        vm.handle.ask(|reply| VmRequest::Resize(Resize::Zone(zone), reply)).await.unwrap();
        let disk = ResizeDiskRequest { id: "_disk1".to_owned(), desired_size: 1 << 30 };
        vm.handle.ask(|reply| VmRequest::ResizeDisk(disk, reply)).await.unwrap();
        let pool = GrowPoolRequest { path: "/pool".into(), size: None, force: false };
        vm.handle.ask(|reply| VmRequest::GrowPool(pool, reply)).await.unwrap();
        assert_eq!(vm.state().await, VmState::Paused);
        let expected = "build, resume, pause, resize vcpus, resize dram, resize balloon, resize zone, resize disk, \
                        grow pool";
        assert_eq!(vm.log().join(", "), expected);
    });
}

#[test]
fn grown_volume_has_its_new_size_at_the_next_boot() {
    run(async {
        const MIB: u64 = 1 << 20;
        let mut config = test_config();
        config.pm_volumes = ["/p,name=data,size=20M", "/p,name=other,size=20M", "/q,name=data"]
            .map(|text| PmVolumeConfig::parse(&format!("pool={text}")).unwrap())
            .to_vec();
        let vm = serve(None, Some(config), AtGuestShutdown::End);
        let size = ResizeDiskRequest { id: "data".to_owned(), desired_size: 40 * MIB };
        vm.handle.ask(|reply| VmRequest::ResizeDisk(size, reply)).await.unwrap();
        let volumes = vm.handle.ask(VmRequest::Info).await.unwrap().config.pm_volumes;
        let sizes: Vec<_> = volumes.iter().map(|volume| volume.size).collect();
        let [grown, other] = [40, 20].map(|mib| VolumeSize::Bytes(mib * MIB));
        assert_eq!(sizes, [grown, other, VolumeSize::Existing]);
        // The volume has grown, but its new part cannot be used yet.
        *vm.failing_step.lock() = Some("resize disk");
        let size = ResizeDiskRequest { id: "data".to_owned(), desired_size: 60 * MIB };
        vm.handle.ask(|reply| VmRequest::ResizeDisk(size, reply)).await.unwrap_err();
        let volumes = vm.handle.ask(VmRequest::Info).await.unwrap().config.pm_volumes;
        assert_eq!(volumes[0].size, VolumeSize::Bytes(60 * MIB));
    });
}

#[test]
fn refused_resize_changes_nothing() {
    run(async {
        let mut config = test_config();
        config.cpus.max_vcpus = 4;
        for method in ["virtio-mem", "acpi"] {
            let mut config = config.clone();
            let memory = format!("size=512M,hotplug_size=1G,hotplug_method={method}");
            config.memory = MemoryConfig::parse(&memory).unwrap();
            let vm = serve(None, Some(config), AtGuestShutdown::End);
            let before = vm.handle.ask(VmRequest::Info).await.unwrap().config;
            let right = ResizeRequest {
                desired_vcpus: Some(2),
                desired_ram: Some(1 << 30),
                desired_balloon: Some(0),
            };
            for wrong in [
                ResizeRequest { desired_vcpus: Some(5), ..right.clone() },
                ResizeRequest { desired_ram: Some(5001), ..right.clone() },
                ResizeRequest { desired_balloon: Some(1), ..right },
            ] {
                let refused =
                    vm.handle.ask(|reply| VmRequest::Resize(Resize::Vm(wrong), reply)).await;
                assert!(matches!(refused, Err(VmError::BadRequest(_) | VmError::Config(_))));
            }
            assert_eq!(vm.handle.ask(VmRequest::Info).await.unwrap().config, before);
            assert_eq!(vm.log(), ["build", "resume"]);
        }
    });
}

#[test]
fn failed_step_and_later_ones_are_not_stored() {
    run(async {
        let steps = ["resize vcpus", "resize dram", "resize balloon"];
        for (failing, label) in steps.into_iter().enumerate() {
            let mut config = test_config();
            config.cpus.max_vcpus = 4;
            config.memory = MemoryConfig::parse("size=512M,hotplug_size=1G").unwrap();
            config.balloon = Some(BalloonConfig::parse("size=0").unwrap());
            let vm = serve(None, Some(config), AtGuestShutdown::End);
            *vm.failing_step.lock() = Some(label);
            let resize = ResizeRequest {
                desired_vcpus: Some(2),
                desired_ram: Some(1 << 30),
                desired_balloon: Some(64 << 20),
            };
            let failed = vm
                .handle
                .ask(|reply| VmRequest::Resize(Resize::Vm(resize), reply))
                .await
                .unwrap_err();
            assert!(matches!(failed, VmError::Failed(_)), "{label}: {failed}");
            let config = vm.handle.ask(VmRequest::Info).await.unwrap().config;
            let stored = (config.cpus.boot_vcpus, config.memory.size, config.balloon.unwrap().size);
            let expected = match failing {
                0 => (1, 512 << 20, 0),
                1 => (2, 512 << 20, 0),
                _ => (2, 1 << 30, 0),
            };
            assert_eq!(stored, expected, "{label}");
            assert_eq!(vm.log()[2..], steps[..=failing], "no step after {label}");
        }
    });
}
