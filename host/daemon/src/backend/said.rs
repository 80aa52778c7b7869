//! Events about operators' changes.
//!
//! Before: a change was made. After: the event list has it. Threads: those of the API.

use ballast_base::Bytes;
use ballast_policy::Settings;

use crate::engine::host::Host;

/// Reports an operator's change of a VM: the limit if the change names one, and the settings if they differ.
pub(super) fn change(host: &Host, name: &str, limit: Option<Option<Bytes>>, (before, after): (Settings, Settings)) {
    if let Some(limit) = limit {
        let text = limit.map_or("removed".into(), |limit| limit.to_string());
        host.events.add(Some(name.to_owned()), "limit", format!("the limit of {name} is {text}"));
    }
    if after != before {
        let (reservation, protect) = (Bytes(after.reservation_bytes), Bytes(after.protect_bytes));
        let text = format!(
            "{name} is {}, with {} shares, a reservation of {reservation}, {protect} protected and {} % headroom",
            after.class,
            after.effective_shares(),
            after.headroom_percent
        );
        host.events.add(Some(name.to_owned()), "settings", text);
    }
}
