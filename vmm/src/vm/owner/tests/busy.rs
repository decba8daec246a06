//! What is answered while something takes its time.

use super::*;

/// The owner is on a thread of its own here, as it is for the API's.
#[test]
fn info_is_answered_while_a_machine_is_built_as_it_was_before() {
    let (building, delay) = std::sync::mpsc::channel();
    let factory = FakeFactory { delay: Arc::new(Mutex::new(Some(delay))), ..Default::default() };
    let log = Arc::clone(&factory.log);
    let (handle, requests) = VmHandle::channel();
    let owner = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(Owner::new(factory, AtGuestShutdown::End, Events::start()).run(None, requests))
    });
    run(async {
        handle.ask(|reply| VmRequest::Create(Box::new(test_config()), reply)).await.unwrap();
        let boot = {
            let handle = handle.clone();
            tokio::task::spawn_local(async move { handle.ask(VmRequest::Boot).await })
        };
        while log.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        for _ in 0..3 {
            assert_eq!(handle.info().await.unwrap().state, VmState::Created);
        }
        assert!(!boot.is_finished());
        drop(building);
        boot.await.unwrap().unwrap();
        assert_eq!(handle.info().await.unwrap().state, VmState::Running);
        handle.ask(VmRequest::ShutdownVmm).await.unwrap();
        assert!(matches!(handle.info().await, Err(VmError::Ending)));
    });
    owner.join().unwrap().unwrap();
}

#[test]
fn a_pause_is_answered_when_everything_stands_still_and_others_do_not_wait() {
    run(async {
        let vm = start(None).await;
        let (moves, stands_still) = std::sync::mpsc::channel();
        *vm.moves.lock() = Some(stands_still);
        let handle = vm.handle.clone();
        let pause = tokio::task::spawn_local(async move { handle.ask(VmRequest::Pause).await });
        // The owner takes one request after the other: when this one is answered, it has done what it does for a pause.
        while vm.state().await != VmState::Paused {}
        assert_eq!(vm.state().await, VmState::Paused);
        assert!(!pause.is_finished());
        drop(moves);
        pause.await.unwrap().unwrap();
    });
}

#[test]
fn info_has_the_memory_without_looking_for_what_is_resident() {
    run(async {
        let vm = start(None).await;
        let info = vm.handle.ask(VmRequest::Info).await.unwrap();
        assert_eq!(info.memory_actual_size, 3 << 30);
        assert!(!vm.log().contains(&"zones"));
    });
}
