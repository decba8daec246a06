//! Tests of calls that add and remove devices.

use super::*;

#[test]
fn device_added_to_a_running_vm_has_its_address_in_the_answer() {
    run(async |mut fixture| {
        let disk = r#"{"path": "/d.raw", "image_type": "Raw", "num_queues": 1, "queue_size": 1024, "vhost_user": false,
                       "readonly": true, "iommu": false, "rate_limiter_config": null, "pci_segment": 0}"#;
        let (status, body) = fixture.call("PUT", "vm.add-disk", disk).await;
        let expected = json!({"id": "_disk0", "bdf": "0000:00:06.0"});
        assert_eq!((status, serde_json::from_str::<Value>(&body).unwrap()), (200, expected));
        // If the VM does not run, the answer is empty.
        for (call, body) in [
            ("vm.add-pmem", r#"{"file": "/p"}"#),
            ("vm.add-vsock", r#"{"cid": 3, "socket": "/s"}"#),
        ] {
            assert_eq!(fixture.call("PUT", call, body).await, (204, String::new()), "{call}");
        }
        let asked = fixture.asked.recv().await.unwrap();
        assert!(asked.contains("queue_size: 1024") && asked.contains("readonly: true"), "{asked}");
        assert_eq!(
            fixture.call("PUT", "vm.remove-device", r#"{"id": "_disk0"}"#).await,
            (204, String::new())
        );
    });
}

#[test]
fn failed_additions_and_removals_have_a_reason() {
    run(async |fixture| {
        for (call, body, status, text) in [
            (
                "vm.add-disk",
                r#"{"path": "/d", "id": "taken"}"#,
                409,
                "--disk: the id taken is already in use; choose another id",
            ),
            ("vm.add-disk", r#"{"path": "/d", "num_queues": 2}"#, 400, "num_queues is 2"),
            (
                "vm.add-disk",
                r#"{"path": "/d", "iommu": true}"#,
                400,
                "--disk: iommu=true is not supported",
            ),
            ("vm.add-disk", "{}", 400, "path"),
            ("vm.add-disk", "", 400, "empty"),
            ("vm.add-disk", "[]", 400, "not a JSON object"),
            ("vm.add-pmem", r#"{"file": 7}"#, 400, "file is 7, and must be a path"),
            ("vm.add-vsock", r#"{"cid": 3}"#, 400, "socket"),
            ("vm.add-vsock", r#"{"cid": -1, "socket": "/s"}"#, 400, "cid is -1, and must be a"),
            (
                "vm.remove-device",
                r#"{"id": "x"}"#,
                404,
                "no such device: \\\"x\\\"; vm.info lists the devices",
            ),
            ("vm.remove-device", "{}", 400, "id"),
        ] {
            let (found, answer) = fixture.call("PUT", call, body).await;
            assert!(found == status && answer.contains(text), "{call} {body}: {found} {answer}");
        }
    });
}
