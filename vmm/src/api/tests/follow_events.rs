//! Tests of `vmm.events`.

use super::*;

#[test]
fn events_are_followed_until_the_vmm_ends() {
    run(async |fixture| {
        let mut client = fixture.connect().await;
        client.send(request("GET", "/api/v1/vmm.events", "")).await;
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            client.0.read_line(&mut head).await.unwrap();
        }
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        fixture.events.emit(Event::VmBooted);
        fixture.events.emit(Event::Failed { reason: "flush failed" });
        fixture.events.end();
        let mut body = String::new();
        while !body.ends_with("0\r\n\r\n") {
            assert_ne!(client.0.read_line(&mut body).await.unwrap(), 0, "{body}");
        }
        let events: Vec<Value> =
            body.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let events: Vec<_> = events.iter().filter(|event| event.is_object()).collect();
        assert_eq!((&events[0]["source"], &events[0]["event"]), (&json!("vm"), &json!("booted")));
        assert_eq!(events[0]["properties"], Value::Null);
        assert_eq!(events[1]["properties"], json!({"reason": "flush failed"}));
        assert_eq!(events.len(), 2);
    });
}

#[test]
fn disconnected_follower_is_detected_without_events() {
    let limits = Limits { connections: 1, ..Limits::API };
    let router = |vm, events| router_within(vm, events, Duration::from_millis(20));
    run_serving(limits, router, async |fixture| {
        let mut follower = fixture.connect().await;
        follower.send(request("GET", "/api/v1/vmm.events", "")).await;
        let mut line = String::new();
        while !line.starts_with('{') {
            line.clear();
            assert_ne!(follower.0.read_line(&mut line).await.unwrap(), 0);
        }
        assert_eq!(line, "{\"quiet_s\":0}\n");
        drop(follower);
        assert_eq!(fixture.call("GET", "vmm.ping", "").await.0, 200);
    });
}
