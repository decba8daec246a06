//! Tests of a VM that is paused because a pool is full.

use std::time::Duration;

use super::*;

const REASON: &str = "pool-full: volume data";

/// Starts a VM, and pauses it because a pool is full.
async fn full() -> Fixture {
    let vm = start(None).await;
    *vm.has_space.lock() = Some(false);
    find_full(&vm);
    assert_eq!(vm.state().await, VmState::Paused);
    vm
}

fn find_full(vm: &Fixture) {
    vm.send(0, MachineEvent::PoolFull { reason: REASON.to_owned() });
}

async fn state_after(vm: &Fixture, seconds: u64) -> VmState {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    vm.state().await
}

#[test]
fn vm_is_paused_until_the_pool_has_space() {
    run(async {
        let vm = full().await;
        assert_eq!(state_after(&vm, 60).await, VmState::Paused);
        let reason = vm.handle.ask(VmRequest::Info).await.unwrap().pause_reason;
        assert_eq!(reason.as_deref(), Some(REASON));
        *vm.has_space.lock() = Some(true);
        assert_eq!(state_after(&vm, 1).await, VmState::Running);
        assert_eq!(vm.handle.ask(VmRequest::Info).await.unwrap().pause_reason, None);
        assert_eq!(vm.log(), ["build", "resume", "pause", "resume"]);
        find_full(&vm);
        assert_eq!(vm.state().await, VmState::Paused);
        let expected = "booting booted pausing paused resuming resumed pausing";
        assert!(vm.emitted().await.join(" ").starts_with(expected));
    });
}

#[test]
fn resumed_guest_has_time_to_return_memory() {
    run(async {
        let vm = full().await;
        vm.handle.ask(VmRequest::Resume).await.unwrap();
        find_full(&vm);
        assert_eq!(state_after(&vm, 9).await, VmState::Running);
        assert_eq!(state_after(&vm, 2).await, VmState::Paused);
        let reason = vm.handle.ask(VmRequest::Info).await.unwrap().pause_reason;
        assert_eq!(reason.as_deref(), Some(REASON));
        vm.handle.ask(VmRequest::Resume).await.unwrap();
        *vm.has_space.lock() = Some(true);
        assert_eq!(state_after(&vm, 1).await, VmState::Running);
        assert!(vm.log().contains(&"retry"));
        *vm.has_space.lock() = None;
        assert_eq!(state_after(&vm, 60).await, VmState::Running);
        // The next full pool pauses the VM immediately.
        find_full(&vm);
        assert_eq!(vm.state().await, VmState::Paused);
    });
}

#[test]
fn resize_resumes_the_guest_that_must_return_memory() {
    run(async {
        let vm = full().await;
        let resize = ResizeRequest { desired_ram: Some(512 << 20), ..ResizeRequest::default() };
        vm.handle.ask(|reply| VmRequest::Resize(Resize::Vm(resize), reply)).await.unwrap();
        assert_eq!(vm.state().await, VmState::Running);
        assert_eq!(state_after(&vm, 11).await, VmState::Paused);
    });
}

#[test]
fn pause_by_a_client_or_a_failure_lasts_although_there_is_space() {
    run(async {
        let vm = start(None).await;
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        find_full(&vm);
        *vm.has_space.lock() = Some(true);
        assert_eq!(state_after(&vm, 60).await, VmState::Paused);
        let vm = full().await;
        vm.handle.ask(VmRequest::Resume).await.unwrap();
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        *vm.has_space.lock() = Some(true);
        assert_eq!(state_after(&vm, 60).await, VmState::Paused);
        let vm = full().await;
        vm.send(0, MachineEvent::MustPause { reason: "flush failed".to_owned() });
        *vm.has_space.lock() = Some(true);
        assert_eq!(state_after(&vm, 60).await, VmState::Paused);
        let reason = vm.handle.ask(VmRequest::Info).await.unwrap().pause_reason;
        assert_eq!(reason.as_deref(), Some("flush failed"));
    });
}

#[test]
fn client_may_pause_a_vm_that_waits_for_space() {
    run(async {
        let vm = full().await;
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        assert_eq!(vm.handle.ask(VmRequest::Info).await.unwrap().pause_reason, None);
        let again = vm.handle.ask(VmRequest::Pause).await;
        assert!(matches!(again, Err(VmError::WrongState { .. })));
        *vm.has_space.lock() = Some(true);
        assert_eq!(state_after(&vm, 60).await, VmState::Paused);
        vm.handle.ask(VmRequest::Resume).await.unwrap();
        assert_eq!(state_after(&vm, 60).await, VmState::Running);
    });
}

/// A write may find no space before or during the client's pause.
#[test]
fn guest_has_time_to_return_memory_after_a_pause_by_a_client() {
    run(async {
        for is_full_before in [true, false] {
            let vm = if is_full_before { full().await } else { start(None).await };
            vm.handle.ask(VmRequest::Pause).await.unwrap();
            find_full(&vm);
            *vm.has_space.lock() = Some(false);
            assert_eq!(state_after(&vm, 60).await, VmState::Paused);
            vm.handle.ask(VmRequest::Resume).await.unwrap();
            // The retry finds no space either.
            find_full(&vm);
            assert_eq!(state_after(&vm, 9).await, VmState::Running);
            assert_eq!(state_after(&vm, 2).await, VmState::Paused);
            let reason = vm.handle.ask(VmRequest::Info).await.unwrap().pause_reason;
            assert_eq!(reason.as_deref(), Some(REASON));
        }
    });
}

#[test]
fn full_pool_does_not_suspend_a_delayed_restart() {
    run(async {
        // The first early restart is immediate, and the second one is delayed.
        for resumed in [false, true] {
            let vm = start(None).await;
            vm.send(0, MachineEvent::GuestReset);
            vm.built(2).await;
            *vm.has_space.lock() = Some(false);
            if resumed {
                vm.send(1, MachineEvent::PoolFull { reason: REASON.to_owned() });
                assert_eq!(vm.state().await, VmState::Paused);
                vm.handle.ask(VmRequest::Resume).await.unwrap();
                assert_eq!(state_after(&vm, 9).await, VmState::Running);
                // The time of the guest would end before the restart.
                vm.send(1, MachineEvent::GuestReset);
                assert_eq!(state_after(&vm, 0).await, VmState::Running);
            } else {
                vm.send(1, MachineEvent::GuestReset);
            }
            vm.send(1, MachineEvent::PoolFull { reason: REASON.to_owned() });
            assert_eq!(state_after(&vm, 2).await, VmState::Running);
            assert_eq!(vm.senders.lock().len(), 3);
            assert_eq!(state_after(&vm, 60).await, VmState::Running);
        }
    });
}

#[test]
fn end_of_a_guest_that_waits_for_space_is_handled() {
    run(async {
        for end in [MachineEvent::GuestReset, triple_fault()] {
            let vm = full().await;
            vm.send(0, end.clone());
            vm.built(2).await;
            // This restart is delayed.
            vm.send(1, MachineEvent::PoolFull { reason: REASON.to_owned() });
            assert_eq!(vm.state().await, VmState::Paused);
            vm.send(1, end);
            assert_eq!(vm.state().await, VmState::Running);
            assert_eq!(vm.senders.lock().len(), 2);
            // The guest remains stopped until the restart.
            assert_eq!(vm.log().last_chunk(), Some(&["pause", "pause"]));
            vm.built(3).await;
            assert_eq!(vm.log().last_chunk(), Some(&["drop", "build", "resume"]));
        }
        let vm = full().await;
        vm.send(0, MachineEvent::GuestShutdown);
        assert!(vm.end.await.unwrap().is_ok());
    });
}

#[test]
fn at_most_one_full_pool_of_a_machine_is_in_the_queue() {
    let (sender, mut events) = tokio::sync::mpsc::unbounded_channel();
    let machine = EventSender::new(1, sender);
    let full = MachineEvent::PoolFull { reason: REASON.to_owned() };
    (0..1000).for_each(|_| machine.clone().send(full.clone()));
    assert_eq!(events.try_recv(), Ok((1, full)));
    assert!(events.try_recv().is_err());
}

#[test]
fn reboot_and_shutdown_end_the_wait_for_space() {
    run(async {
        let vm = full().await;
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        assert_eq!(state_after(&vm, 60).await, VmState::Running);
        let vm = full().await;
        vm.handle.ask(VmRequest::Shutdown).await.unwrap();
        assert_eq!(state_after(&vm, 60).await, VmState::Created);
        vm.handle.ask(VmRequest::Boot).await.unwrap();
        assert_eq!(vm.state().await, VmState::Running);
    });
}
