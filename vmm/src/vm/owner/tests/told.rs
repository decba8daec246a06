//! What is told of a VM's life.

use super::*;

#[test]
fn what_happens_is_told_in_its_order() {
    run(async {
        let vm = start(None).await;
        vm.handle.ask(VmRequest::Pause).await.unwrap();
        vm.handle.ask(VmRequest::Resume).await.unwrap();
        let resize = ResizeRequest { desired_ram: Some(1 << 30), ..ResizeRequest::default() };
        vm.handle.ask(|reply| VmRequest::Resize(resize, reply)).await.unwrap();
        vm.handle.ask(VmRequest::Reboot).await.unwrap();
        vm.handle.ask(VmRequest::Shutdown).await.unwrap();
        // What is refused is not told.
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
        assert_eq!(vm.told().await.join(" "), expected.join(" "));
        // A boot that fails only begins; a guest that switches itself off takes all with it.
        let vm = serve(Some(0), None, AtGuestShutdown::End);
        vm.handle.ask(|reply| VmRequest::Create(test_config().into(), reply)).await.unwrap();
        assert!(vm.handle.ask(VmRequest::Boot).await.is_err());
        assert_eq!(vm.told().await, ["booting"]);
        let vm = start(None).await;
        vm.send(0, MachineEvent::GuestShutdown);
        while !vm.end.is_finished() {
            tokio::task::yield_now().await;
        }
        assert_eq!(vm.told().await, ["booting", "booted", "shutdown", "deleted"]);
    });
}
