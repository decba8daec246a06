//! Tests of the events of a VM.

use super::*;

#[test]
fn events_are_emitted_in_order() {
    run(async {
        let vm = start(None).await;
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        vm.handle.ask(VmRequest::Resume).await.unwrap();
        let resize = ResizeRequest { desired_ram: Some(512 << 20), ..ResizeRequest::default() };
        vm.handle.ask(|reply| VmRequest::Resize(Resize::Vm(resize), reply)).await.unwrap();
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        vm.handle.ask(VmRequest::Shutdown).await.unwrap();
        // A refused request emits no event.
        assert!(vm.handle.ask(VmRequest::Pause).await.is_err());
        assert!(vm.handle.ask(VmRequest::Resume).await.is_err());
        vm.handle.ask(VmRequest::Boot).await.unwrap();
        vm.send(2, MachineEvent::MustPause { reason: "no room".to_owned() });
        assert!(vm.handle.ask(VmRequest::Resume).await.is_err());
        vm.handle.ask(VmRequest::Delete).await.unwrap();
        let expected = [
            "booting booted pausing paused resuming resumed resizing resized rebooting rebooted shutdown",
            "booting booted failed shutdown deleted",
        ];
        assert_eq!(vm.emitted().await.join(" "), expected.join(" "));
        // A failed boot emits its reason. If the guest powers itself off, its VM is deleted.
        let vm = serve(Some(0), None, AtGuestShutdown::End);
        vm.handle.ask(|reply| VmRequest::Create(test_config().into(), reply)).await.unwrap();
        assert!(vm.handle.ask(VmRequest::Boot).await.is_err());
        assert_eq!(vm.emitted().await, ["booting", "boot-failed"]);
        let vm = start(None).await;
        vm.send(0, MachineEvent::GuestShutdown);
        while !vm.end.is_finished() {
            tokio::task::yield_now().await;
        }
        assert_eq!(vm.emitted().await, ["booting", "booted", "shutdown", "deleted"]);
    });
}

#[test]
fn failed_boot_emits_the_reason_of_its_answer() {
    run(async {
        let mut vm = serve(Some(0), None, AtGuestShutdown::End);
        vm.handle.ask(|reply| VmRequest::Create(test_config().into(), reply)).await.unwrap();
        let error = vm.handle.ask(VmRequest::Boot).await.unwrap_err();
        vm.events.end();
        let mut reasons = Vec::new();
        while let Some(WatcherItem::Event(event)) = vm.watcher.next().await {
            reasons
                .extend(event.properties.iter().filter_map(|values| values.get("reason").cloned()));
        }
        assert_eq!(reasons, [error.to_string()]);
    });
}

#[test]
fn refused_resize_emits_no_event() {
    run(async {
        let vm = start(None).await;
        let zone = ResizeZoneRequest { id: "nosuch".to_owned(), desired_ram: 0 };
        let vcpus = ResizeRequest { desired_vcpus: Some(9), ..ResizeRequest::default() };
        let ram = ResizeRequest { desired_ram: Some(5001), ..ResizeRequest::default() };
        for resize in [Resize::Zone(zone), Resize::Vm(vcpus), Resize::Vm(ram)] {
            let text = resize.to_string();
            let refused = vm.handle.ask(|reply| VmRequest::Resize(resize, reply)).await;
            assert!(refused.is_err(), "{text}");
        }
        assert_eq!(vm.emitted().await, ["booting", "booted"]);
    });
}

/// A guest can restart at any rate, and events may be written to a file. Restarts by a client
/// always emit events.
#[test]
fn events_of_restart_loop_are_limited_but_last_state_is_emitted() {
    run(async {
        let vm = start(None).await;
        for machine in 0..500 {
            vm.send(machine, MachineEvent::GuestReset);
            vm.built(machine + 2).await;
        }
        for _ in 0..100 {
            vm.handle.ask(VmRequest::Reboot).await.unwrap();
        }
        vm.handle.ask(VmRequest::Delete).await.unwrap();
        let withheld = vm.events.counters().withheld();
        let emitted = vm.emitted().await;
        let count = |name| emitted.iter().filter(|event| **event == name).count();
        assert!((101..150).contains(&count("rebooting")), "{emitted:?}");
        assert!(withheld > 900, "{withheld}");
        // The completion of the guest's last restart is emitted before the client's first reboot.
        assert_eq!(
            &emitted[emitted.len() - 203..][..3],
            ["rebooted", "rebooting", "rebooted"],
            "{emitted:?}"
        );
        assert_eq!(&emitted[emitted.len() - 3..], ["rebooted", "shutdown", "deleted"]);
    });
}
