//! Tests of events and requests during a pause: the guest ends, or clients end the pause.

use super::*;

#[test]
fn end_of_paused_guest_takes_effect_on_resume() {
    run(async {
        for event in [MachineEvent::GuestReset, triple_fault()] {
            let vm = start(None).await;
            vm.handle.ask(VmRequest::Pause).await.unwrap();
            // If the guest ends again, the VM does not change.
            for _ in 0..2 {
                vm.send(0, event.clone());
                assert_eq!(vm.state().await, VmState::Paused);
            }
            assert_eq!(vm.log(), ["build", "resume", "pause"]);
            vm.handle.ask(VmRequest::Resume).await.unwrap();
            assert_eq!(vm.state().await, VmState::Running);
            assert_eq!(vm.log()[3..], ["resume", "drop", "build", "resume"]);
            let expected = "booting booted pausing paused resuming resumed rebooting rebooted";
            assert_eq!(vm.emitted().await.join(" "), expected);
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
fn kept_end_does_not_apply_to_next_machine() {
    run(async {
        let vm = start(None).await;
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        vm.send(0, MachineEvent::GuestShutdown);
        // A client can reboot a paused VM, which ends the pause.
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

/// Pauses the VM, and calls `undo` before all parts have stopped. Returns the error of the pause,
/// and the events since the start of the pause.
async fn undone(undo: impl AsyncFnOnce(&VmHandle)) -> (VmError, Vec<&'static str>) {
    let vm = start(None).await;
    let moves = vm.delays.add("stand still");
    let handle = vm.handle.clone();
    let pause = tokio::task::spawn_local(async move { handle.ask(VmRequest::Pause).await });
    // Wait until the delay applies to this pause, so that a later pause is not delayed.
    while vm.delays.has("stand still") {
        tokio::task::yield_now().await;
    }
    undo(&vm.handle).await;
    assert!(!pause.is_finished());
    drop(moves);
    let refused = pause.await.unwrap().unwrap_err();
    (refused, vm.emitted().await.split_off(2))
}

#[test]
fn pause_undone_before_standstill_is_refused() {
    run(async {
        let (refused, emitted) = undone(async |vm| vm.ask(VmRequest::Resume).await.unwrap()).await;
        let expected = "another call ended vm.pause before the vCPUs had stopped, and the VM is running; repeat vm.pause if necessary";
        assert_eq!(refused.to_string(), expected);
        assert_eq!(emitted, ["pausing", "resuming", "resumed"]);
        let (refused, emitted) =
            undone(async |vm| vm.ask(VmRequest::Shutdown).await.unwrap()).await;
        assert!(
            matches!(refused, VmError::PauseEnded { state: VmState::Created, .. }),
            "{refused}"
        );
        assert_eq!(emitted, ["pausing", "shutdown"]);
        let (refused, emitted) = undone(async |vm| vm.ask(VmRequest::Reboot).await.unwrap()).await;
        assert!(
            matches!(refused, VmError::PauseEnded { state: VmState::Running, .. }),
            "{refused}"
        );
        assert_eq!(emitted, ["pausing", "rebooting", "rebooted"]);
        let (refused, emitted) = undone(async |vm| vm.ask(VmRequest::Delete).await.unwrap()).await;
        assert!(matches!(refused, VmError::NotCreated), "{refused}");
        assert_eq!(emitted, ["pausing", "shutdown", "deleted"]);
    });
}

/// The second pause is not ended by the end of the first pause.
#[test]
fn second_pause_is_independent_of_undone_one() {
    run(async {
        let (refused, emitted) = undone(async |vm| {
            vm.ask(VmRequest::Resume).await.unwrap();
            vm.ask(VmRequest::Pause).await.unwrap();
        })
        .await;
        assert!(matches!(refused, VmError::PauseEnded { state: VmState::Paused }), "{refused}");
        assert_eq!(emitted, ["pausing", "resuming", "resumed", "pausing", "paused"]);
        // Pauses of another VM are independent.
        let (refused, emitted) = undone(async |vm| {
            vm.ask(VmRequest::Delete).await.unwrap();
            vm.ask(|reply| VmRequest::Create(test_config().into(), reply)).await.unwrap();
            vm.ask(VmRequest::Boot).await.unwrap();
            vm.ask(VmRequest::Pause).await.unwrap();
        })
        .await;
        assert!(matches!(refused, VmError::PauseEnded { state: VmState::Paused }), "{refused}");
        assert_eq!(emitted.last_chunk(), Some(&["pausing", "paused"]));
    });
}

#[test]
fn boot_of_paused_vm_is_a_resume() {
    run(async {
        let vm = start(None).await;
        assert!(matches!(vm.handle.ask(VmRequest::Boot).await, Err(VmError::WrongState { .. })));
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        vm.handle.ask(VmRequest::Boot).await.unwrap();
        assert_eq!(vm.state().await, VmState::Running);
        assert_eq!(vm.log(), ["build", "resume", "pause", "resume"]);
        // A boot does not resume a VM that must not be resumed.
        vm.send(0, MachineEvent::MustPause { reason: "flush failed".to_owned() });
        assert!(matches!(vm.handle.ask(VmRequest::Boot).await, Err(VmError::CannotResume { .. })));
        assert_eq!(
            vm.emitted().await.join(" "),
            "booting booted pausing paused resuming resumed failed"
        );
    });
}
