//! The log callback: its levels, its argument, the thread it is called on.

use crate::common::c_door::{c_context_desc, c_decode_desc};
use crate::fixture::{Reply, plain};
use folio::api::Target;
use folio::ffi::*;
use folio::problem::Kind;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{from_mut, null_mut};
use std::thread::{ThreadId, current};

type Messages = Vec<(i32, String, ThreadId)>;

unsafe extern "C" fn note(user: *mut c_void, level: i32, message: *const c_char) {
    // SAFETY: the test's own list, which outlives the context, and a C string.
    let (messages, text) = unsafe { (&mut *user.cast::<Messages>(), CStr::from_ptr(message)) };
    messages.push((level, text.to_string_lossy().into_owned(), current().id()));
}

/// What creating a context and a decode handle logs up to a level.
fn messages(log_level: i32) -> Messages {
    let mut messages = Messages::new();
    let mut desc = c_context_desc(Target::Cpu { num_threads: 2 });
    desc.log = Some(note);
    desc.log_level = log_level;
    desc.log_user = from_mut(&mut messages).cast();
    let (mut ctx, mut decode) = (null_mut(), null_mut());
    // SAFETY: live structs and handles, destroyed before the list goes.
    unsafe {
        Reply::of(|err| folio_context_create(&desc, &mut ctx, err)).assert_ok("context");
        let desc = c_decode_desc(&plain(Kind::Decode).desc());
        Reply::of(|err| folio_decode_create(ctx, &desc, &mut decode, err)).assert_ok("decode");
        let kernel = CStr::from_ptr(folio_decode_kernel(decode)).to_string_lossy();
        let named = messages.iter().any(|message| message.1.contains(&*kernel));
        assert_eq!(named, log_level == FOLIO_LOG_INFO, "{messages:?}");
        folio_decode_destroy(decode);
        folio_context_destroy(ctx);
    }
    messages
}

#[test]
fn messages_reach_the_callback_up_to_its_level() {
    for level in [FOLIO_LOG_ERROR, FOLIO_LOG_WARNING, FOLIO_LOG_INFO] {
        for (of, text, thread) in messages(level) {
            assert!((FOLIO_LOG_ERROR..=level).contains(&of), "{of}: {text}");
            assert!(!text.is_empty());
            assert_eq!(thread, current().id(), "{text}");
        }
    }
}
