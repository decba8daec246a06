//! Tests of the metrics of calls.

use axum::http::StatusCode;
use axum::routing::put;
use foreshore_devices::metrics::Metrics;

use super::*;
use crate::api::call_names;
use crate::api::routes::REFUSALS;

#[test]
fn usual_series_of_calls_exist_before_the_first_call() {
    let calls = Arc::<CallMetrics>::default();
    drop(calls.count_calls(Router::new()));
    let text = Metrics::new("a").encode(&*calls).unwrap();
    for labels in [
        r#"call="vm.boot",code="204""#,
        r#"call="vm.boot",code="500""#,
        r#"call="vm.add-disk",code="200""#,
        r#"call="vm.add-disk",code="204""#,
        r#"call="vm.add-disk",code="409""#,
        r#"call="vm.add-vsock",code="429""#,
        r#"call="vm.resize",code="409""#,
        r#"call="vm.resize",code="429""#,
        r#"call="vmm.events",code="429""#,
        r#"call="unknown",code="404""#,
    ] {
        let series = format!(r#"foreshore_api_requests_total{{vm="a",{labels}}} 0"#);
        assert!(text.lines().any(|line| line == series), "{series} in {text}");
    }
}

#[test]
fn calls_with_refusals_of_their_own_exist() {
    let calls = call_names();
    for (call, _) in REFUSALS {
        assert!(calls.contains(call), "{call}");
    }
}

#[test]
fn call_is_counted_if_its_client_has_disconnected() {
    let calls = Arc::<CallMetrics>::default();
    let (begin, mut begun) = mpsc::unbounded_channel();
    let (release, released) = tokio::sync::watch::channel(false);
    let slow = async move || {
        begin.send(()).unwrap();
        released.clone().wait_for(|is_released| *is_released).await.unwrap();
        StatusCode::NO_CONTENT
    };
    let counted = |_, _| calls.count_calls(Router::new().route("/slow", put(slow)));
    run_serving(Limits::API, counted, async |fixture| {
        let mut client = fixture.connect().await;
        client.send(request("PUT", "/slow", "")).await;
        begun.recv().await.unwrap();
        drop(client);
        release.send(true).unwrap();
        while calls.answers("/slow", 204) == 0 {
            tokio::task::yield_now().await;
        }
    });
}
