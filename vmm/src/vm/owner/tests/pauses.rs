//! What comes behind a pause: ends of the guest, and clients who want something else.

use super::*;

#[test]
fn a_guest_that_ends_itself_in_a_pause_stands_still_and_ends_when_it_goes_on() {
    run(async {
        for event in [MachineEvent::GuestReset, triple_fault()] {
            let vm = start(None).await;
            vm.handle.ask(VmRequest::Pause).await.unwrap();
            // One end is enough, whoever else has one to tell.
            for _ in 0..2 {
                vm.send(0, event.clone());
                assert_eq!(vm.state().await, VmState::Paused);
            }
            assert_eq!(vm.log(), ["build", "resume", "pause"]);
            vm.handle.ask(VmRequest::Resume).await.unwrap();
            assert_eq!(vm.state().await, VmState::Running);
            assert_eq!(vm.log()[3..], ["resume", "drop", "build", "resume"]);
            let expected = "booting booted pausing paused resuming resumed rebooting rebooted";
            assert_eq!(vm.told().await.join(" "), expected);
        }
        let vm = start(None).await;
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        vm.send(0, MachineEvent::GuestShutdown);
        assert_eq!(vm.state().await, VmState::Paused);
        vm.handle.ask(VmRequest::Resume).await.unwrap();
        assert!(vm.end.await.unwrap().is_ok());
    });
}

#[test]
fn an_end_that_was_kept_is_its_machines_alone() {
    run(async {
        let vm = start(None).await;
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        vm.send(0, MachineEvent::GuestShutdown);
        // A client's reboot is done in a pause as well, and ends it.
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        assert_eq!(vm.state().await, VmState::Running);
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        vm.send(1, MachineEvent::GuestShutdown);
        vm.handle.ask(VmRequest::Shutdown).await.unwrap();
        vm.handle.ask(VmRequest::Boot).await.unwrap();
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        vm.handle.ask(VmRequest::Resume).await.unwrap();
        assert_eq!(vm.state().await, VmState::Running);
        assert_eq!(vm.senders.lock().len(), 3);
    });
}
